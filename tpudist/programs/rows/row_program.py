"""A function that is traced at several numbers of rows, and evaluated at any."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from tpudist.programs.rows import row_kernels, small_count_scalars, small_counts
from tpudist.programs.rows.confirmation import find_deviation
from tpudist.programs.rows.errors import RowsError
from tpudist.programs.rows.evaluator import Evaluator, Need
from tpudist.programs.rows.labels import LabelledProgram, find_difference, label
from tpudist.programs.rows.row_sizes import Dim, Point, num_determining, size_at
from tpudist.programs.rows.rules import rule_of
from tpudist.programs.rows.scans_over_rows import Scans

LEAST = 2
"""Rows of a trace: with one or none JAX writes some operations in another way."""
_NUM_CONFIRMING = 2
Trace = Callable[[Point], Any]


class RowProgram:
    """A function of batches, for any number of their rows.

    Attributes:
        full: How many rows each symbol has at most: those of the padded arrays that `evaluate`
            takes, 2 at least.
        labelled: What depends on the number of rows.
        needs: What sizes must be at least, known once it has been evaluated.
        even: Sizes that must be the same on all replicas, known then too.
        gathered: See `Evaluator`.
        broken_claims: See `Evaluator`.
    """

    def __init__(self, trace: Trace, full: Point):
        """Traces the function.

        Args:
            trace: Gives the closed jaxpr of the function for a number of rows of each symbol. What
                it raises means that the function does not exist for so many.
            full: The padded rows of each symbol.

        Raises:
            RowsError: The function is not the same for all numbers of rows, or something in it
                depends on them in no way that is known.
        """
        self._trace = trace
        self.full: Point = tuple(max(rows, LEAST) for rows in full)
        self._traces: dict[Point, Any] = {}
        self._errors: dict[Point, Exception] = {}
        self._scans = Scans()
        self.points, self.labelled = self._find_labels()
        self._traces.clear()  # a large function's take megabytes, and the labels have what they say
        self._take_over_few()
        self.needs: dict[Need, None] = {}
        self.even: dict[Any, str] = {}
        self.gathered: dict[int, Any] = {}
        self.broken_claims: set[int] = set()
        self._confirmed: set[Point] = set(self.points)

    def _take_over_few(self) -> None:
        """Learns which numbers are others where a batch has one row or none."""
        symbols = range(len(self.full))
        alone = [(i,) for i in symbols]
        # All of them last: numbers that depend on one batch are known by then.
        together = [tuple(symbols)] if len(alone) > 1 else []
        for own in (*alone, *together):
            for count in range(LEAST):
                point = _replace(self.full, dict.fromkeys(own, count))
                program = self._find_trace(point)
                if program is not None:
                    self.labelled = small_count_scalars.take_over(
                        self.labelled, program, point, own
                    )
                del self._traces[point]

    @property
    def out_dims(self) -> tuple[tuple[Dim, ...], ...]:
        """The dims of each output."""
        return self.labelled.out_dims

    def evaluate(self, counts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The padded outputs for padded inputs, of which so many rows are real.

        Raises:
            RowsError: An operation cannot be followed.
        """
        evaluator = Evaluator(counts, rule_of)
        outputs = evaluator.program(self.labelled, args)
        self.needs |= evaluator.needs
        self.even |= evaluator.even
        self.gathered |= evaluator.gathered
        self.broken_claims |= evaluator.broken_claims
        return outputs

    def check(self, counts: Sequence[Point]) -> None:
        """Refuses numbers of rows for which the function is not what `evaluate` computes.

        Args:
            counts: For each replica, how many rows each symbol has.

        Raises:
            RowsError: It is not.
        """
        for point in dict.fromkeys(counts):
            self._confirm(point)
            live = small_counts.live_equations(self.labelled, point) if 0 in point else None
            for size, least, line, equation in self.needs:
                if size.at(point) < least and (live is None or equation in live):
                    raise RowsError(
                        f"with {_rows(point)} it has fewer than the {least} that it takes", line
                    )
        for size, where in self.even.items():
            sizes = [size_at(size, point) for point in counts]
            if len(set(sizes)) > 1:
                raise RowsError(
                    f"{where} combines values of different shapes: replicas hold {sizes} rows. "
                    "Join rows with all_gather or strategy.gather, and get the values of replicas "
                    "outside of the program"
                )

    def _confirm(self, point: Point) -> None:
        if point in self._confirmed:
            return
        program = self._find_trace(point)
        if program is None:
            self._confirm_untraced(point, self._errors[point])
            return
        del self._traces[point]
        deviation = find_deviation(self.labelled, program, point)
        if deviation is not None and min(point) < LEAST:
            deviation = small_counts.find_deviation(self.labelled, program, point)
        if deviation is not None:
            raise RowsError(f"with {_rows(point)} the function differs: {deviation}")
        self._confirmed.add(point)

    def _confirm_untraced(self, point: Point, error: Exception) -> None:
        """Accepts no rows where a library rejects them: the program for more rows is used.

        JAX rejects a maximum over no rows, which is -inf there, as in TensorFlow. NumPyro rejects
        a plate over none, which adds nothing. Errors of the user's own code are raised.
        """
        other = small_counts.find_other_formula(self.labelled, self.full)
        if 0 not in point or not small_counts.is_of_library(error) or other is not None:
            raise RowsError(
                f"with {_rows(point)} the function cannot be traced: {error}"
            ) from error
        self._confirmed.add(point)

    def _find_labels(self) -> tuple[tuple[Point, ...], LabelledProgram]:
        try:
            return self._find_labels_of_traces()
        except RowsError:
            if not self._scans.find_over_rows():
                raise
        self._traces.clear()
        self._errors.clear()
        return self._find_labels_of_traces()

    def _find_labels_of_traces(self) -> tuple[tuple[Point, ...], LabelledProgram]:
        try:
            return self._label(LEAST)
        except RowsError:
            # Of few rows there may be less than what it takes, as in `x[:3]`.
            least = max(self.full) // 2 + 1
            if least <= LEAST:
                raise
            try:
                return self._label(least)
            except RowsError:
                pass
            raise

    def _label(self, least: int) -> tuple[tuple[Point, ...], LabelledProgram]:
        points = self._choose_points(least)
        return points, label([self._traces[p] for p in points], points)

    def _choose_points(self, least: int) -> tuple[Point, ...]:
        """Numbers of rows at which the traces have one structure, and which determine all sizes."""
        full = self.full
        if self._find_trace(full) is None:
            raise self._errors[full]
        values = [self._values_of(i, least) for i in range(len(full))]
        points = [full]
        for i in range(len(full)):
            points += [_replace(full, {i: v}) for v in values[i][:2]]
        for i, j in itertools.combinations(range(len(full)), 2):
            points.append(_replace(full, {i: values[i][0], j: values[j][0]}))
        for k in range(2, 2 + _NUM_CONFIRMING):
            points.append(tuple(each[k] for each in values))
        assert len(points) == num_determining(len(full)) + _NUM_CONFIRMING
        for point in points:
            self._require_structure(point)
        return tuple(points)

    def _values_of(self, i: int, least: int) -> list[int]:
        """Numbers of rows of one symbol, beside the full one, with the structure of that."""
        full = self.full[i]
        spread = [full - 1, full // 2, full - 2, -(-full * 3 // 4), full // 4, full - 3]
        least = min(least, full)
        below = [v for v in spread if least <= v < full]
        # Where there are few below, or the function wants more rows, those near the full one.
        rest = [*range(full - 1, least - 1, -1)][:8] + [full + k for k in range(1, 9)]
        found: list[int] = []
        for v in dict.fromkeys([*below, *rest]):
            if self._has_structure(_replace(self.full, {i: v})):
                found.append(v)
            if len(found) == 2 + _NUM_CONFIRMING:
                return found
        self._require_structure(_replace(self.full, {i: (below or rest)[0]}))
        raise RowsError(
            f"the function differs for other numbers of rows: for {self.full[i]} rows, only "
            f"{found or 'none'} give the same"
        )

    def _has_structure(self, point: Point) -> bool:
        program = self._find_trace(point)
        return program is not None and find_difference(self._traces[self.full], program) is None

    def _require_structure(self, point: Point) -> None:
        program = self._find_trace(point)
        if program is None:
            error = self._errors[point]
            raise RowsError(f"it cannot be traced with {_rows(point)}: {error}") from error
        difference = find_difference(self._traces[self.full], program)
        if difference is not None:
            raise RowsError(
                f"with {_rows(point)} it is traced to a different program than with "
                f"{_rows(self.full)}: {difference}"
            )

    def _find_trace(self, point: Point) -> Any:
        """The trace for so many rows; None if there is none."""
        if point not in self._traces:
            try:
                with self._scans.watch(point), row_kernels.keep_whole():
                    self._traces[point] = self._trace(point)
            except Exception as error:
                self._errors[point], self._traces[point] = error, None
        return self._traces[point]


def _replace(point: Point, changes: dict[int, int]) -> Point:
    return tuple(changes.get(i, x) for i, x in enumerate(point))


def _rows(point: Point) -> str:
    return " and ".join(map(str, point)) + " rows"
