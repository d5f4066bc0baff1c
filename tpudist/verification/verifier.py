"""Compares a step on the replicas with the same step on one device: `Strategy.verify`.

Three comparisons, from simple to complex:

- *copies*: all replicas have the same rows, so only reductions matter;
- *rows*: replicas have different rows, so operations before a reduction matter too;
- *tail*: replicas have different numbers of rows, so the weights of means matter too.
"""

import collections
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tpudist.context.strategy_base import StrategyBase
from tpudist.lowering import placement
from tpudist.options import LocalMeanWarning, RunOptions
from tpudist.programs import jaxprs, random_streams
from tpudist.reduce_op import ReduceOp
from tpudist.run.frame.captures import Capture
from tpudist.run.rehearsal import Rehearsal
from tpudist.verification import averages, causes, comparison
from tpudist.verification.batches import Arguments, Rows
from tpudist.verification.compared_values import Pairing
from tpudist.verification.comparison import Finding, Pair
from tpudist.verification.explanations import Explainer
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
        self._state_changed = False
        self._epsilon = 0.0
        self._fix_draws: Rewrite | None = None  # if the step draws random numbers

    def report(self, name: str, rows: int | None) -> VerificationReport:
        arguments = self._arguments
        equal = arguments.names_of_equal_batches()
        if arguments.is_partial:
            arguments.fill()
            num_rows = arguments.min_rows_per_replica
            self._notes.append(
                f"The batch is partial: {num_rows} of its rows per replica were used."
            )
        if rows is not None and arguments.min_rows_per_replica * self._n > rows:
            arguments.cut(max(rows // self._n, 1))
            self._notes.append(
                f"Only {arguments.min_rows_per_replica * self._n} rows of the batch were used."
            )
        given = self._runs.on_replicas(arguments.as_passed())
        self._compare(given)
        if not self._state_changed and any(self._compared.values()):
            self._notes.append("No state changed. Is the learning rate of this step zero?")
        if self._pairing.not_compared:
            names = ", ".join(sorted(self._pairing.not_compared))
            self._notes.append(f"Not compared, because each replica has its own value: {names}.")
        by_rows = "rows" in self._compared and not self._exchanges
        faults, found = given.traced.faults, self._findings
        explainer = Explainer(found, faults, self._pairing, self._runs, self._n, by_rows=by_rows)
        differences = explainer.explain()
        self._notes += explainer.notes
        if equal:
            differences.append(Difference(equal, "rows", None, 0.0, 0.0, *causes.EQUAL_ROWS))
        return VerificationReport(
            name, self._n, tuple(differences), self._compared, self._skipped, tuple(self._notes)
        )

    def _compare(self, given: Rehearsal) -> None:
        """Makes all comparisons that are possible.

        Args:
            given: The run on the replicas with the arguments as they were passed.
        """
        arguments, closed = self._arguments, given.traced.program.closed
        self._epsilon = find_epsilon(closed)
        draws = random_streams.draws_random_numbers(closed)
        draws_differ_because = self._why_draws_differ(closed) if draws else ""
        if draws and not draws_differ_because:
            self._fix_draws = random_streams.fix
        captured = _find_captured_batch(given)
        if captured:
            reason = f"the step captures {captured}; pass it as an argument."
            self._skipped["copies"] = self._skipped["tail"] = reason
        else:
            self._compare_copies(shares_draws=bool(draws_differ_because))
        if reason := self._why_rows_differ(given, captured) or draws_differ_because:
            if reason == _POSITIONS and arguments.can_exchange:
                self._compare_exchanged()
            else:
                self._skipped["rows"] = reason
            self._skipped["tail"] = reason
            return
        if draws:
            self._notes.append("Random numbers were replaced by a constant.")
            given = self._runs.on_replicas(arguments.as_passed(), self._fix_draws)
        self._compare_with_one_device("rows", given, Rows.ALL)
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
        rewrite = random_streams.share if shares_draws else self._fix_draws
        many = self._runs.on_replicas(self._arguments.copies(), rewrite)
        if not shares_draws:
            self._compare_with_one_device("copies", many, Rows.COPIES)
            return
        copies = self._runs.on_one_device(Rows.COPIES, self._epsilon, None).exact
        pairs = functools.partial(self._pairing.pairs_of_means, copies=copies, num_copies=self._n)
        self._compare_with_one_device("copies", many, Rows.FIRST, pairs)
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
        self._record(
            "rows",
            self._pairing.pairs_of_all,
            self._runs.on_replicas(self._arguments.exchange(), fix),
            OneDevice(self._runs.on_replicas(passed, fix), ()),
            lambda: self._runs.on_replicas_rounded(passed),
        )

    def _compare_tails(self) -> None:
        if self._arguments.min_rows_per_replica < 2:
            self._skipped["tail"] = "a replica has only one row: use a larger batch."
            return
        for counts in _partial_counts(self._n):
            try:
                many = self._runs.on_replicas(self._arguments.split(counts), self._fix_draws)
            except ValueError as error:
                self._skipped["tail"] = f"a partial batch is not supported: {error}"
                return
            self._compare_with_one_device("tail", many, Rows.FIRST)

    def _compare_with_one_device(
        self,
        key: str,
        many: Rehearsal,
        rows: Rows,
        pairs: Callable[..., Iterator[Pair]] | None = None,
    ) -> None:
        """Compares a run on the replicas with one device that has these rows."""
        fixes = self._fix_draws is not None
        self._record(
            key,
            pairs or self._pairing.pairs,
            many,
            self._runs.on_one_device(rows, self._epsilon, self._fix_draws),
            lambda: self._runs.on_one_device_rounded(rows, self._epsilon, fixes_draws=fixes),
        )

    def _record(
        self,
        key: str,
        pairs: Callable[..., Iterator[Pair]],
        many: Rehearsal,
        one: OneDevice,
        run_rounded: Callable[[], list[Rehearsal]],
    ) -> None:
        """Compares two runs, and small differences also with runs whose sums have errors."""

        def find(disturbed: Sequence[Rehearsal]) -> tuple[list[Finding], int]:
            values = [*pairs(many, one.exact, disturbed)]
            self._state_changed |= any(
                x.before is not None and (x.one != x.before).any() for x in values
            )
            found = (comparison.compare(x, self._epsilon, self._n) for x in values)
            return [x for x in found if x is not None], len(values)

        found, number = find(one.disturbed)
        # Runs with rounding errors in each sum compile more programs, so they are made only if all
        # differences are small enough to be rounding.
        if found and all(x.may_be_rounding for x in found):
            found, _ = find([*one.disturbed, *run_rounded()])
        found = averages.drop_equal_quotients(found, self._pairing.averages)
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


def _find_captured_batch(given: Rehearsal) -> str:
    """Returns a name of a batch that the step captures instead of receiving it; empty if none."""
    captures = (x for x in given.traced.positions if isinstance(x, Capture))
    return next((f"the batch '{x.name}'" for x in captures), "")


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
        if each[-1] > 0 and len(set(each)) == 1:
            each[0], each[-1] = each[0] + 1, each[-1] - 1
        return each

    def with_empty(rows: int) -> list[int]:
        each = uneven(rows)
        each[0], each[-1] = each[0] + each[-1], 0
        return each

    return (uneven, with_empty)
