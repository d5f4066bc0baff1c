"""Compares a step on the replicas with the same step on one device, and explains differences."""

import collections
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tpudist.context.strategy_base import StrategyBase
from tpudist.lowering import placement
from tpudist.options import LocalMeanWarning, RunOptions
from tpudist.programs import jaxprs, random_streams
from tpudist.programs.degrees.degree_faults import Fault
from tpudist.reduce_op import ReduceOp
from tpudist.run.rehearsal import Rehearsal
from tpudist.verification import averages, comparison
from tpudist.verification.batches import Arguments, Rows
from tpudist.verification.compared_values import Pairing
from tpudist.verification.comparison import Finding, Values
from tpudist.verification.places import Place, Places
from tpudist.verification.report import Difference, VerificationReport
from tpudist.verification.runs import OneDevice, Rewrite, Runs, find_epsilon
from tpudist.xla import descriptions
from tpudist.xla.mesh import ReplicaMesh

_POSITIONS = "the step draws random numbers, and computes with the numbers of rows."


def verify(
    strategy: StrategyBase,
    one_device: ReplicaMesh,
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    options: RunOptions | None,
    rows: int | None,
) -> VerificationReport:
    """Returns the comparison of a step with one device; see `Strategy.verify`."""
    n = strategy.num_replicas_in_sync
    name = descriptions.name_of(fn)
    if n == 1:
        return VerificationReport(name, 1, notes=("The strategy has one replica.",))
    arguments = Arguments(args, kwargs, strategy.replica_mesh, one_device)
    runs = Runs(strategy, one_device, fn, options, arguments)
    # The runs use several meshes, also in the scope of a strategy, and the report says more than
    # the warning.
    with placement.without_mesh(), warnings.catch_warnings():
        warnings.simplefilter("ignore", LocalMeanWarning)
        return _Verifier(runs, arguments, n).report(name, rows)


class _Verifier:
    def __init__(self, runs: Runs, arguments: Arguments, n: int):
        self._runs, self._arguments, self._n = runs, arguments, n
        self._pairing = Pairing()
        self._findings: dict[str, list[Finding]] = {}
        self._compared: dict[str, int] = {}
        self._exchanges = False  # whether rows were exchanged, and not given to one device
        self._skipped: dict[str, str] = {}
        self._notes: list[str] = []
        self._changed = False
        self._epsilon = 0.0
        self._fix: Rewrite = None  # replaces random numbers, if the step draws some

    def report(self, name: str, rows: int | None) -> VerificationReport:
        arguments = self._arguments
        equal = arguments.equal_batches()
        if arguments.is_partial:
            arguments.fill()
            self._notes.append(
                f"The batch is partial: {arguments.each} of its rows per replica were used."
            )
        if rows is not None and arguments.each * self._n > rows:
            arguments.cut(max(rows // self._n, 1))
            self._notes.append(f"Only {arguments.each * self._n} rows of the batch were used.")
        given = self._runs.on_replicas(arguments.as_passed())
        faults = given.traced.faults
        self._compare(given)
        if not self._changed and any(self._compared.values()):
            self._notes.append("No state changed. Is the learning rate of this step zero?")
        if self._pairing.not_compared:
            names = ", ".join(sorted(self._pairing.not_compared))
            self._notes.append(f"Not compared, because each replica has its own value: {names}.")
        found = [*self._explain_all(faults)]
        found += self._find_in_program(faults, all(x.comparison == "tail" for x in found))
        if equal:
            found.append(Difference(equal, "rows", None, 0.0, 0.0, *comparison.EQUAL_ROWS))
        return VerificationReport(
            name, self._n, tuple(found), self._compared, self._skipped, tuple(self._notes)
        )

    # Comparisons.

    def _compare(self, given: Rehearsal) -> None:
        """Makes all comparisons that are possible.

        Args:
            given: The run on the replicas with the arguments as they were passed.
        """
        # Three comparisons, from simple to complex. Copies: all replicas have the same rows, so
        # only reductions matter. Rows: replicas have different rows, so operations before a
        # reduction matter, too. Tail: replicas have different numbers of rows, so the weights of
        # means matter.
        arguments, closed = self._arguments, given.traced.program.closed
        self._epsilon = find_epsilon(closed)
        draws = random_streams.draws_random_numbers(closed)
        random = self._why_draws_differ(closed) if draws else ""
        self._fix = random_streams.fix if draws and not random else None
        captured = _find_captured_batch(given)
        if captured:
            reason = f"the step captures {captured}; pass it as an argument."
            self._skipped["copies"] = self._skipped["tail"] = reason
        else:
            self._compare_copies(shares_draws=bool(random))
        if reason := self._why_rows_differ(given, captured) or random:
            self._skipped["rows"] = self._skipped["tail"] = reason
            if reason == _POSITIONS and arguments.can_exchange:
                del self._skipped["rows"]
                self._compare_exchanged()
            return
        if draws:
            self._notes.append("Random numbers were replaced by a constant.")
            given = self._runs.on_replicas(arguments.as_passed(), self._fix)
        self._note_one_device("rows", given, Rows.ALL)
        if any(self._findings.values()):
            self._skipped.setdefault("tail", "full batches differ; correct that first.")
        if "tail" not in self._skipped:
            self._compare_tails()

    def _compare_copies(self, *, shares_draws: bool) -> None:
        """Compares replicas that have the same rows.

        Args:
            shares_draws: Whether all replicas draw the numbers of the first one. One device draws
                other numbers for a copy of a row, so it has each row once.
        """
        rewrite = random_streams.share if shares_draws else self._fix
        many = self._runs.on_replicas(self._arguments.copies(), rewrite)
        if not shares_draws:
            self._note_one_device("copies", many, Rows.COPIES)
            return
        copies = self._runs.on_one_device(Rows.COPIES, self._epsilon, None).exact
        pairs = functools.partial(self._pairing.pairs_of_means, copies=copies, num_copies=self._n)
        self._note_one_device("copies", many, Rows.FIRST, pairs)
        if self._pairing.sums:
            names = ", ".join(sorted(self._pairing.sums))
            self._notes.append(
                "Not compared in 'copies', because they are sums over rows, and one device would "
                f"draw different numbers for a copy of a row: {names}."
            )

    def _compare_exchanged(self) -> None:
        """Compares with a run in which rows are exchanged between replicas.

        One device with all rows would have other positions of rows.
        """
        self._exchanges = True
        self._notes.append(
            "The step computes with the positions of rows. For 'rows', the rows were exchanged "
            "between replicas instead of moved to one device. Random numbers were replaced by a "
            "constant."
        )
        passed, fix = self._arguments.as_passed(), random_streams.fix
        self._note(
            "rows",
            self._pairing.pairs_of_all,
            self._runs.on_replicas(self._arguments.exchange(), fix),
            OneDevice(self._runs.on_replicas(passed, fix), ()),
            lambda: self._runs.on_replicas_rounded(passed),
        )

    def _compare_tails(self) -> None:
        if self._arguments.each < 2:
            self._skipped["tail"] = "a replica has only one row: use a larger batch."
            return
        for counts in _partial_counts(self._n):
            try:
                many = self._runs.on_replicas(self._arguments.split(counts), self._fix)
            except ValueError as error:
                self._skipped["tail"] = f"a partial batch is not supported: {error}"
                return
            self._note_one_device("tail", many, Rows.FIRST)

    def _note_one_device(
        self,
        key: str,
        many: Rehearsal,
        rows: Rows,
        pairs: Callable[..., Iterator[Values]] | None = None,
    ) -> None:
        """Compares a run on the replicas with one device that has these rows."""
        fixes = self._fix is not None
        self._note(
            key,
            pairs or self._pairing.pairs,
            many,
            self._runs.on_one_device(rows, self._epsilon, self._fix),
            lambda: self._runs.on_one_device_rounded(rows, self._epsilon, fixes_draws=fixes),
        )

    def _note(
        self,
        key: str,
        pairs: Callable[..., Iterator[Values]],
        many: Rehearsal,
        one: OneDevice,
        run_rounded: Callable[[], list[Rehearsal]],
    ) -> None:
        """Compares two runs, and small differences also with runs whose sums have errors."""

        def find(disturbed: Sequence[Rehearsal]) -> tuple[list[Finding], int]:
            values = [*pairs(many, one.exact, disturbed)]
            self._changed |= any(x.before is not None and (x.one != x.before).any() for x in values)
            found = (comparison.compare(x, self._epsilon, self._n) for x in values)
            return [x for x in found if x is not None], len(values)

        found, number = find(one.disturbed)
        # Runs with rounding errors in each sum compile more programs, so they are made only if all
        # differences are small enough to be rounding.
        if found and all(x.may_be_rounding for x in found):
            found, _ = find([*one.disturbed, *run_rounded()])
        found = averages.drop_right(found, self._pairing.averages)
        self._findings.setdefault(key, []).extend(found)
        self._compared[key] = self._compared.get(key, 0) + number

    def _why_draws_differ(self, closed: jaxprs.ClosedJaxpr) -> str:
        """Returns why rows cannot be compared with constant random bits; empty if they can be."""
        if not self._arguments.batches:
            return "the step draws random numbers, and no argument is a batch."
        if not random_streams.can_be_fixed(closed):
            return "the step draws random numbers in a way that cannot be replaced by a constant."
        if _positions(closed) != _positions(self._runs.program_of_one(Rows.ALL).closed):
            return _POSITIONS
        return ""

    def _why_rows_differ(self, given: Rehearsal, captured: str) -> str:
        """Returns why one device with all rows would compute other values; empty if it does not."""
        if given.traced.aggregated.get(ReduceOp.MEAN):
            return (
                "the step keeps statistics of each replica's rows, as batch normalization does: "
                "one device would use the statistics of all rows."
            )
        if self._arguments.own:
            return "an argument has one value for each replica."
        if not self._arguments.batches and not captured:
            return (
                "no argument has different rows on each replica. Pass a batch of a distributed "
                "dataset."
            )
        return ""

    # Explanations.

    def _explain_all(self, faults: Sequence[Fault]) -> Iterator[Difference]:
        # An array is explained once, by the simplest comparison that finds it (see `_compare`): the
        # others would add causes that this one excludes.
        seen: set[str] = set()
        for key, found in self._findings.items():
            factor = comparison.factor_of_step([x.factor for x in found], self._n)
            new: dict[str, Finding] = {}  # a leaf may be in two findings of partial batches
            for x in found:
                if x.leaf not in seen:
                    new.setdefault(x.leaf, x)
            seen.update(new)
            has_places = key != "tail" and not (key == "rows" and self._exchanges)
            places = self._find_places() if new and has_places else None
            for x in new.values():
                yield self._explain(key, x, factor, places, faults)

    def _find_places(self) -> Places | None:
        try:
            by_rows = "rows" in self._compared and not self._exchanges
            many, one = self._runs.programs(by_rows=by_rows)
            fixes = random_streams.can_be_fixed(many.closed)
            return Places(many, one, self._n, fixes_draws=fixes)
        except Exception as error:  # the lines are an addition to a report that stands
            self._notes.append(f"The lines were not found ({type(error).__name__}: {error}).")
            return None

    def _explain(
        self,
        key: str,
        found: Finding,
        factor: float | None,
        places: Places | None,
        faults: Sequence[Fault],
    ) -> Difference:
        """Returns the difference of one array, with its cause.

        Args:
            key: The comparison that found it first.
            found: The array.
            factor: The factor of the step, if it is a power of the number of replicas.
            places: The lines, if they could be found.
            faults: The findings of the analysis of the program.
        """
        is_power = comparison.is_power(found.factor, self._n)
        place = Place() if places is None else places.find(found.output, has_factor=is_power)
        line, known = place.line, comparison.factor_of_array(found, self._n)
        mixed = next((x for x in faults if x.mixed), None)
        if found.differs:
            # The same rows on all replicas may hide it: the largest of its differences is reported.
            every = [y for some in self._findings.values() for y in some if y.leaf == found.leaf]
            found = max(every, key=lambda y: y.max_error)
            line = self._pairing.lines.get(found.leaf) or line
            cause, remedy = comparison.NOT_REDUCED
        elif place.kind == "mixed" and not is_power:
            cause, remedy = comparison.MIXED
        elif mixed is not None and key == "copies" and not is_power:
            (cause, remedy), line = comparison.MIXED, mixed.counted or mixed.summed
        else:
            # Decay and clipping change the factor of the whole, but not that of the line.
            best = next((x for x in (factor, known, place.factor) if x is not None), None)
            kind = place.kind if key == "copies" or place.kind == "number" else ""
            cause, remedy = comparison.explain(key, self._n, best, kind)
            if found.leaf in self._pairing.averages and known is not None and key != "tail":
                cause, remedy = averages.ONE_NUMBER
                cause = f"{known:.4g} times: {cause}"
        return Difference(
            found.leaf, key, known, found.max_error, found.tolerance, cause, remedy, line
        )

    def _find_in_program(
        self, faults: Sequence[Fault], numbers_agree: bool
    ) -> Iterator[Difference]:
        """Yields the differences that the numbers of this batch do not show."""
        for fault in faults:
            leaf, factor, where = "random numbers", None, fault.counted
            if fault.is_draw:
                cause, remedy = comparison.SHARED_DRAWS
            elif fault.excess and numbers_agree:
                leaf, factor = "state", float(self._n) ** float(fault.excess)
                where = fault.summed or fault.counted
                cause, remedy = comparison.explain("program", self._n, factor)
            else:
                continue
            yield Difference(leaf, "program", factor, math.nan, math.nan, cause, remedy, where)


def _find_captured_batch(given: Rehearsal) -> str:
    for variable in given.traced.positions:
        if getattr(variable, "held", None) is not None:
            return f"the batch '{variable.name}'"
    return ""


def _positions(closed: jaxprs.ClosedJaxpr) -> collections.Counter:
    """Returns the shapes of all position arrays (`iota`) that a program computes with."""
    return collections.Counter(
        eqn.params["shape"] for eqn in jaxprs.walk_used(closed) if eqn.primitive.name == "iota"
    )


def _partial_counts(n: int) -> Sequence[Callable[[int], list[int]]]:
    """Returns two divisions of one replica's rows over all: uneven, and with an empty replica."""

    # Even counts would hide a mean of means, which is right if all replicas have as many rows.
    def uneven(rows: int) -> list[int]:
        each = [rows // n] * n
        each[0] += rows - sum(each)
        if n > 1 and each[-1] > 0 and len(set(each)) == 1:
            each[0], each[-1] = each[0] + 1, each[-1] - 1
        return each

    def with_empty(rows: int) -> list[int]:
        each = uneven(rows)
        each[0], each[-1] = each[0] + each[-1], 0
        return each

    return (uneven, with_empty)
