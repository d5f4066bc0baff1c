"""A function that is traced with several numbers of rows, and evaluated for any number."""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax.typing import ArrayLike

from tpudist.options.member_names import format_counts
from tpudist.programs.jaxprs import Program
from tpudist.programs.rows import row_kernels, small_count_scalars, small_counts
from tpudist.programs.rows.confirmation import find_deviation
from tpudist.programs.rows.errors import NumbersLearned, RowsError
from tpudist.programs.rows.evaluator import Evaluator, Requirements
from tpudist.programs.rows.labels import LabelledProgram, label
from tpudist.programs.rows.row_sizes import (
    Count,
    Dim,
    Point,
    are_two,
    num_determining,
    size_at,
)
from tpudist.programs.rows.rules import rule_of
from tpudist.programs.rows.scans_over_rows import Scans
from tpudist.programs.rows.trace_comparison import find_difference

MIN_TRACED_ROWS = 2
"""Least rows of a labelled trace. With one row or none JAX writes some operations differently."""
# Three points determine a polynomial of degree 2 in one symbol. With one more point, ceil(n / 2)
# and 1 + n % 2 still fitted a parabola by chance and gave wrong results; with two more, they do
# not. `confirmation` then checks each number of rows that occurs.
_NUM_CONFIRMING = 2
_MAX_TRIED = 8


class RowProgram:
    """A function of batches, for any number of their rows.

    Args:
        trace: Called with a number of rows for each symbol; returns the closed jaxpr of the
            function. An exception means that the function does not exist for these numbers.
        full: Padded rows of each symbol.
        counts: Points at which the program is needed first, if it may be labelled by the fewest
            traces: at `full` and one of these points. That is possible for a single batch, in whose
            program all sizes are fixed or multiples of its rows or of their square. None to label
            all programs, by more traces.

    Attributes:
        full: Rows of each symbol in the padded arrays of `evaluate`, at least 2.
        points: The numbers of rows of the labelled traces.
        labelled: The labelled program.
        requirements: Conditions on the numbers of rows, known after `evaluate`.

    Raises:
        RowsError: If the function differs between numbers of rows, or depends on them by no known
            formula.
    """

    def __init__(
        self,
        trace: Callable[[Point], Program],
        full: Point,
        counts: Collection[Point] | None = None,
    ):
        self._trace = trace
        self.full: Point = tuple(max(rows, MIN_TRACED_ROWS) for rows in full)
        # The small counts whose numbers have been learned; None for all.
        self._learned: set[Point] | None = None
        self._traces: dict[Point, Any] = {}
        self._errors: dict[Point, Exception] = {}
        self._scans = Scans()
        if counts is None:
            self.points, self.labelled = self._find_labels()
            # The traces of a large function use megabytes. The labels contain all they say.
            self._traces.clear()
            self._learn_small_counts()
        else:
            self.points, self.labelled = self._label_by_two(counts)
            self._traces.clear()
            self._learned = {point for point in counts if min(point) < MIN_TRACED_ROWS}
        self.requirements = Requirements()
        # The labels were fitted to the traces at these points, and compared with all of them.
        self._confirmed: set[Point] = set(self.points)
        for point in sorted(self._learned or ()):
            self._confirm_labels()
            self.labelled = self._learn(point, (0,))

    def _learn_small_counts(self) -> None:
        """Finds the numbers with another value for a batch of one row or none."""
        symbols = range(len(self.full))
        alone = [(i,) for i in symbols]
        # All symbols at once come last: the numbers that depend on one batch are known by then.
        together = [tuple(symbols)] if len(alone) > 1 else []
        for own in (*alone, *together):
            for count in range(MIN_TRACED_ROWS):
                point = _substitute(self.full, dict.fromkeys(own, count))
                self.labelled = self._learn(point, own)
                del self._traces[point]  # megabytes; `_confirm` traces it again if it occurs

    def _learn(self, point: Point, own: tuple[int, ...]) -> LabelledProgram:
        """Returns the program with the numbers of a trace, in which the symbols `own` are small."""
        program = self._find_trace(point)
        if program is None:
            return self.labelled
        return small_count_scalars.learn_scalars(self.labelled, program, point, own)

    def _confirm_labels(self) -> None:
        """Compares labels by two traces with two more, before a batch of one row or none.

        Traces with so few rows hardly show sizes (`small_counts`). `x[::4]` of 8 and of 7 rows has
        2 rows, which two traces alone take for a fixed size.

        Raises:
            RowsError: If the labels are wrong, or the function differs with few rows.
        """
        few = ((rows,) for rows in itertools.count(MIN_TRACED_ROWS))
        for point in itertools.islice((p for p in few if p not in self.points), 2):
            if point not in self._confirmed:
                program = self._find_trace(point)
                del self._traces[point]
                if program is None:
                    raise RowsError(f"it cannot be traced with {_rows(point)}")
                deviation = find_deviation(self.labelled, program, point)
                if deviation is not None:
                    raise RowsError(deviation)
                self._confirmed.add(point)

    def has_learned(self, point: Point) -> bool:
        """Returns whether numbers that only few rows show are known for these numbers of rows."""
        return self._learned is None or point in self._learned or min(point) >= MIN_TRACED_ROWS

    @property
    def out_dims(self) -> tuple[tuple[Dim, ...], ...]:
        """The dims of each output."""
        return self.labelled.out_dims

    def evaluate(self, counts: Sequence[Count | None], args: Sequence[ArrayLike]) -> list[Any]:
        """Returns the padded outputs for padded inputs.

        Args:
            counts: Real number of rows of each symbol; None if it is unknown at the start.
            args: The padded inputs.

        Raises:
            RowsError: If an operation cannot be followed.
        """
        return Evaluator(counts, rule_of, self.requirements).program(self.labelled, args)

    def check(self, counts: Sequence[Point]) -> None:
        """Rejects numbers of rows for which `evaluate` does not compute the function.

        Args:
            counts: Number of rows of each symbol, for each replica.

        Raises:
            RowsError: If it does not.
            NumbersLearned: If it would with other numbers, which only few rows show.
        """
        for point in dict.fromkeys(counts):
            self._confirm(point)
            # With no rows a whole branch of the program may be unused: its minimum does not matter.
            live = small_counts.live_equations(self.labelled, point) if 0 in point else None
            for size, minimum, line, equation in self.requirements.minimum_sizes:
                if size.at(point) < minimum and (live is None or equation in live):
                    raise RowsError(
                        f"with {_rows(point)} it has fewer than the {minimum} that it takes", line
                    )
        for size, where in self.requirements.equal_sizes.items():
            sizes = [size_at(size, point) for point in counts]
            if len(set(sizes)) > 1:
                raise RowsError(
                    f"{where} combines values of different shapes: replicas hold "
                    f"{format_counts(sizes)} rows. "
                    "Join rows with all_gather or strategy.gather, and get the values of replicas "
                    "outside of the program"
                )

    def _confirm(self, point: Point) -> None:
        if point in self._confirmed:
            return
        if not self.has_learned(point):
            try:
                self._confirm_labels()
            except RowsError:
                raise NumbersLearned from None
            if self._learn(point, (0,)) is not self.labelled:
                raise NumbersLearned
        program = self._find_trace(point)
        del self._traces[point]
        if program is None:
            self._confirm_untraced(point, self._errors[point])
            return
        deviation = find_deviation(self.labelled, program, point)
        if deviation is not None and min(point) < MIN_TRACED_ROWS:
            deviation = small_counts.find_deviation_of_few(self.labelled, program, point)
        if deviation is not None:
            raise RowsError(f"with {_rows(point)} the function differs: {deviation}")
        self._confirmed.add(point)

    def _confirm_untraced(self, point: Point, error: Exception) -> None:
        """Accepts a batch without rows that a library rejects; raises errors of the user's code.

        The program for more rows is used. JAX rejects a maximum over no rows, which is -inf here,
        as in TensorFlow. NumPyro rejects a plate over no rows, which adds nothing.
        """
        other = small_counts.find_other_formula(self.labelled, self.full)
        if 0 not in point or not small_counts.is_of_library(error) or other is not None:
            raise RowsError(
                f"with {_rows(point)} the function cannot be traced: {error}"
            ) from error
        self._confirmed.add(point)

    def _label_by_two(self, counts: Collection[Point]) -> tuple[tuple[Point, ...], LabelledProgram]:
        """Labels the program by the traces for `full` and for the most rows in `counts` below it.

        Both have been confirmed then. `_confirm` compares the traces for all other numbers of rows.
        """
        others = [p for p in counts if MIN_TRACED_ROWS <= min(p) and p != self.full]
        points = (self.full, max(others, default=(self.full[0] - 1,)))
        if not are_two(points) or points[1][0] < MIN_TRACED_ROWS:
            raise RowsError("more traces are needed")
        for point in points:
            self._require_structure(point)
        return points, label([self._traces[p] for p in points], points)

    def _find_labels(self) -> tuple[tuple[Point, ...], LabelledProgram]:
        try:
            return self._label_traces()
        except RowsError:
            # `associative_scan` over rows has another structure for each number of rows: a second
            # try traces the calls whose lengths differ as scans.
            if not self._scans.find_over_rows():
                raise
        self._traces.clear()
        self._errors.clear()
        return self._label_traces()

    def _label_traces(self) -> tuple[tuple[Point, ...], LabelledProgram]:
        try:
            return self._label(MIN_TRACED_ROWS)
        except RowsError:
            # The function may need more rows, as `x[:3]` does: the second try uses more than half
            # of the full number. If it fails, the first error is raised.
            least = max(self.full) // 2 + 1
            if least > MIN_TRACED_ROWS:
                with contextlib.suppress(RowsError):
                    return self._label(least)
            raise

    def _label(self, least: int) -> tuple[tuple[Point, ...], LabelledProgram]:
        points = self._choose_points(least)
        return points, label([self._traces[p] for p in points], points)

    def _choose_points(self, least: int) -> tuple[Point, ...]:
        """Returns numbers of rows that determine all sizes, and whose traces have one structure.

        Args:
            least: Least number of rows of a trace.
        """
        full = self.full
        if self._find_trace(full) is None:
            raise self._errors[full]
        # For each symbol alone its first two values determine n and n^2 (with the full number),
        # for each pair one more point determines the product, and the last points confirm the fit.
        values = [self._values_of(i, least) for i in range(len(full))]
        points = [full]
        for i in range(len(full)):
            points += [_substitute(full, {i: v}) for v in values[i][:2]]
        for i, j in itertools.combinations(range(len(full)), 2):
            points.append(_substitute(full, {i: values[i][0], j: values[j][0]}))
        for k in range(2, 2 + _NUM_CONFIRMING):
            # All symbols change at once, so that products are confirmed too.
            points.append(tuple(each[k] for each in values))
        assert len(points) == num_determining(len(full)) + _NUM_CONFIRMING
        for point in points:
            self._require_structure(point)
        return tuple(points)

    def _values_of(self, i: int, least: int) -> list[int]:
        """Returns four other numbers of rows of a symbol whose traces have the same structure."""
        full = self.full[i]
        # Values spread over the range, with odd and even ones, so that a formula with a remainder
        # or a threshold does not pass for a polynomial.
        spread = [full - 1, full // 2, full - 2, math.ceil(full * 3 / 4), full // 4, full - 3]
        least = min(least, full)
        below = [v for v in spread if least <= v < full]
        # If these are too few, or the function needs more rows: the nearest numbers below `full`,
        # and then above it. Each costs a trace.
        rest = [*range(full - 1, least - 1, -1)][:_MAX_TRIED]
        rest += range(full + 1, full + 1 + _MAX_TRIED)
        values: list[int] = []
        for v in dict.fromkeys([*below, *rest]):
            if self._has_structure(_substitute(self.full, {i: v})):
                values.append(v)
            if len(values) == 2 + _NUM_CONFIRMING:
                return values
        self._require_structure(_substitute(self.full, {i: (below or rest)[0]}))
        raise RowsError(
            f"the function differs for other numbers of rows: for {self.full[i]} rows, only "
            f"{values or 'none'} give the same"
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
        """Returns the trace for these numbers of rows; None if tracing fails, see `_errors`."""
        if point not in self._traces:
            try:
                with self._scans.watch(point), row_kernels.keep_whole():
                    self._traces[point] = self._trace(point)
            except Exception as error:
                self._errors[point], self._traces[point] = error, None
        return self._traces[point]


def _substitute(point: Point, changes: dict[int, int]) -> Point:
    return tuple(changes.get(i, x) for i, x in enumerate(point))


def _rows(point: Point) -> str:
    return " and ".join(map(str, point)) + " rows"
