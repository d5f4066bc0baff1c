"""Runs a step on the replicas and on one device from the same state, and compares."""

import collections
import contextlib
import dataclasses
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.lowering import placement
from tpudist.options import LocalMeanWarning, RunOptions
from tpudist.programs import jaxprs, random_streams
from tpudist.programs.rows.degree_walk import Fault
from tpudist.reduce_op import ReduceOp, VariableAggregation
from tpudist.run.rehearsal import Rehearsal, StandIn
from tpudist.values.per_replica import PerReplica, is_distributed
from tpudist.verification import comparison
from tpudist.verification.batches import Arguments, HostBatch, Rows, fetch, put
from tpudist.verification.comparison import Finding, Values
from tpudist.verification.places import Place, Places, Program
from tpudist.verification.report import Difference, VerificationReport
from tpudist.xla import random_keys
from tpudist.xla.mesh import ReplicaMesh

_AGGREGATED = (VariableAggregation.SUM, VariableAggregation.MEAN)

SEEDS = (0, 1)
"""Seeds of the disturbed runs on one device."""


def verify(
    strategy: Any,
    one_device: ReplicaMesh,
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    options: RunOptions | None,
    rows: int | None,
) -> VerificationReport:
    """Returns the comparison of a step with one device; see `Strategy.verify`."""
    n = strategy.num_replicas_in_sync
    name = getattr(fn, "__name__", type(fn).__name__)
    if n == 1:
        return VerificationReport(name, 1, notes=("The strategy has one replica.",))
    arguments = Arguments(args, kwargs, strategy.replica_mesh, one_device)
    verifier = _Verifier(strategy, one_device, fn, options, arguments)
    # It works on several meshes, also in the scope of a strategy, and its report says more.
    with placement.without_mesh(), warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore", LocalMeanWarning)
        return verifier.report(name, rows)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Logs nothing of the partial batches that a verification makes."""
    logger = logging.getLogger("tpudist")

    def keep(record: logging.LogRecord) -> bool:
        return record.module != "partial_batch"

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@dataclasses.dataclass
class _Verifier:
    strategy: Any
    one_device: ReplicaMesh
    fn: Callable[..., Any]
    options: RunOptions | None
    arguments: Arguments

    def __post_init__(self):
        self.n = self.strategy.num_replicas_in_sync
        self.epsilon = 0.0
        self.fix: Any = None  # how random numbers are replaced, if some are drawn
        self._twins: dict[Any, Any] = {}
        self._not_compared: set[str] = set()
        self._lines: dict[str, str] = {}  # of arrays that differ between replicas

    def report(self, name: str, rows: int | None) -> VerificationReport:
        notes: list[str] = []
        arguments = self.arguments
        if rows is not None and arguments.each * self.n > rows:
            arguments.cut(max(rows // self.n, 1))
            notes.append(f"Only {arguments.each * self.n} rows of the batch were used.")
        if arguments.is_partial:
            arguments.fill()
            notes.append(
                f"The batch is partial: {arguments.each} of its rows per replica were used."
            )
        given = self._on_replicas(arguments.as_passed())
        closed, faults = given.traced.program.closed, given.traced.faults
        self.epsilon = _epsilon(closed)
        draws = random_streams.draws_random_numbers(closed)
        findings: dict[str, list[Finding]] = {}
        compared: dict[str, int] = {}
        skipped: dict[str, str] = {}
        changed = False

        def note(key: str, values: Iterator[Values]) -> None:
            nonlocal changed
            all_values = list(values)
            changed = changed or any(
                x.before is not None and (x.one != x.before).any() for x in all_values
            )
            compared[key] = compared.get(key, 0) + len(all_values)
            found = (comparison.compare(x, self.epsilon) for x in all_values)
            findings.setdefault(key, []).extend(x for x in found if x is not None)

        fixes = not draws or self._can_fix_draws(closed)
        self.fix = random_streams.fix if draws and fixes else None
        captured = self._captures_batch(given)
        if captured:
            skipped["copies"] = skipped["tail"] = (
                f"the step captures {captured}; pass it as an argument."
            )
        else:
            # One device draws the same numbers for a copy of a row only if they are constant.
            rewrite, same = (self.fix, Rows.COPIES) if fixes else (random_streams.share, Rows.FIRST)
            many = self._on_replicas(arguments.copies(), rewrite)
            one = self._on_one(same, rewrite if fixes else None)
            note("copies", self._pairs(many, *one))
        if not arguments.batches and not arguments.own and not captured:
            skipped["rows"] = skipped["tail"] = (
                "no argument has different rows on each replica. Pass a batch of a distributed "
                "dataset."
            )
        elif not fixes:
            reason = "the step draws random numbers, which differ on one device with other rows."
            skipped["rows"] = skipped["tail"] = reason
        elif given.traced.aggregated.get(ReduceOp.MEAN):
            skipped["rows"] = skipped["tail"] = (
                "the step keeps statistics of each replica's rows, as batch normalization does: "
                "one device would use the statistics of all rows."
            )
        elif arguments.own:
            skipped["rows"] = skipped["tail"] = "an argument has one value for each replica."
        elif arguments.batches or captured:
            if draws:
                notes.append("Random numbers were replaced by a constant.")
                given = self._on_replicas(arguments.as_passed(), self.fix)
            note("rows", self._pairs(given, *self._on_one(Rows.ALL, self.fix)))
        if "tail" not in skipped and arguments.batches:
            if arguments.each < 2:
                skipped["tail"] = "a replica has one row: give a batch with more."
            else:
                for counts in _partial_counts(self.n):
                    try:
                        many = self._on_replicas(arguments.split(counts), self.fix)
                    except ValueError as error:
                        skipped["tail"] = f"a partial batch is not supported: {error}"
                        break
                    one = self._on_one(Rows.FIRST, self.fix)
                    note("tail", self._pairs(many, *one))
        if not changed and any(compared.values()):
            notes.append("No state changed: is the learning rate of this step zero?")
        if self._not_compared:
            names = ", ".join(sorted(self._not_compared))
            notes.append(f"Not compared, because each replica has a value of its own: {names}.")
        differences = [*self._explain(findings, compared, faults, notes)]
        differences += self._find_in_program(
            faults, all(x.comparison == "tail" for x in differences)
        )
        if equal := arguments.equal_batches():
            differences.append(Difference(equal, "rows", None, 0.0, 0.0, *comparison.EQUAL_ROWS))
        return VerificationReport(name, self.n, tuple(differences), compared, skipped, tuple(notes))

    def _find_in_program(
        self, faults: Sequence[Fault], numbers_agree: bool
    ) -> Iterator[Difference]:
        """The differences that the numbers of this batch do not show."""
        for fault in faults:
            if fault.is_draw:
                cause, remedy = comparison.SHARED_DRAWS
                leaf, factor = "random numbers", None
            elif fault.excess and numbers_agree:
                leaf, factor = "state", float(self.n) ** float(fault.excess)
                finding = Finding(leaf, 0, factor, math.nan, math.nan)
                cause, remedy = comparison.explain("program", finding, self.n, factor)
            else:
                continue
            where = fault.summed if fault.excess and fault.summed else fault.counted
            yield Difference(leaf, "program", factor, math.nan, math.nan, cause, remedy, where)

    def _explain(
        self,
        findings: dict[str, list[Finding]],
        compared: dict[str, int],
        faults: Sequence[Fault],
        notes: list[str],
    ) -> Iterator[Difference]:
        seen: set[str] = set()
        for key, found in findings.items():
            factor = comparison.factor_of_step([x.factor for x in found], self.n)
            new = [x for x in found if x.leaf not in seen]
            places = None
            if new and key != "tail":
                try:
                    places = self._places(by_rows="rows" in compared)
                except Exception as error:  # the lines are an addition to a report that stands
                    notes.append(f"The lines were not found ({type(error).__name__}: {error}).")
            for x in new:
                if x.leaf in seen:
                    continue
                seen.add(x.leaf)
                if x.differs:  # with the same rows on all replicas it may not
                    every = (y for some in findings.values() for y in some if y.leaf == x.leaf)
                    x = max(every, key=lambda y: y.max_error)
                is_power = comparison.is_power(x.factor, self.n)
                place = Place()
                if places is not None:
                    place = places.find(x.output, has_factor=is_power)
                if x.differs:
                    place = Place(self._lines.get(x.leaf) or place.line)
                known = x.factor
                if not is_power and known is not None:
                    # A number always has a factor, and a factor of one explains nothing.
                    if x.is_number or abs(known - 1) < comparison.SAME_FACTOR:
                        known = None
                mixed = next((fault for fault in faults if fault.mixed), None)
                if mixed is not None and key == "copies" and not is_power and not x.differs:
                    (cause, remedy), line = comparison.MIXED, mixed.counted or mixed.summed
                else:
                    # Decay and clipping change the factor of the whole, but not that of the line.
                    best = factor if comparison.is_power(factor, self.n) else known
                    best = place.factor if best is None else best
                    kind = place.kind if key == "copies" or place.kind == "number" else ""
                    cause, remedy = comparison.explain(key, x, self.n, best, kind)
                    line = place.line
                yield Difference(x.leaf, key, known, x.max_error, x.tolerance, cause, remedy, line)

    def _places(self, *, by_rows: bool) -> Places:
        """Evaluates the step on replicas and on one device, with different rows or with copies."""
        mesh = dataclasses.replace(self.one_device, deterministic=self.n)

        def value_of(variable: Any) -> jax.Array:
            if variable.on_read:
                return jax.device_put(fetch(variable._value), mesh.stacked)
            return self._value_on_one(variable)

        call = self.arguments.on_one_device_by_replicas(mesh, copies=not by_rows)
        many = self._trace(self._twin(mesh, value_of, None), call)
        # Traced without a mesh, as replicas that share a device are: both are evaluated there.
        alone = dataclasses.replace(self.one_device, deterministic=1)
        twin = self._twin(alone, self._value_on_one, None)
        whole = Rows.FIRST if not by_rows else Rows.ALL
        call = self.arguments.on_one_device(lambda x: x, whole)
        fixes = self.fix is not None
        return Places(many, self._trace(twin, call), self.n, fixes_draws=fixes)

    def _can_fix_draws(self, closed: Any) -> bool:
        """Whether a step computes the same for a row on one device, if random bits are constant."""
        if not self.arguments.batches or not random_streams.can_be_fixed(closed):
            return False
        alone = dataclasses.replace(self.one_device, deterministic=1)
        twin = self._twin(alone, self._value_on_one, None)
        whole = self._trace(twin, self.arguments.on_one_device(lambda x: x, Rows.ALL))
        return _positions(closed) == _positions(whole.closed)

    def _trace(self, twin: Any, call: tuple[tuple, dict]) -> Program:
        with twin._use_mesh():
            traced, inputs = twin._replicator.trace(self.fn, *call, self.options)
        return Program(traced.program.closed, traced.program.stacked, inputs)

    # Runs.

    def _on_replicas(self, call: tuple[tuple, dict], rewrite: Any = None) -> Rehearsal:
        strategy = self.strategy
        if rewrite is not None:
            strategy = self._twin(self.strategy.replica_mesh, lambda x: x._value, rewrite)
        with strategy._use_mesh():
            return strategy._replicator.rehearse(self.fn, *call, self.options)

    def _on_one(self, rows: Rows, rewrite: Any = None) -> tuple[Rehearsal, list[Rehearsal]]:
        """Runs the step on one device, and again with disturbed inputs."""
        disturbed = [self._run_on_one(seed, rows, rewrite) for seed in SEEDS]
        return self._run_on_one(None, rows, rewrite), disturbed

    def _run_on_one(self, seed: int | None, rows: Rows, rewrite: Any) -> Rehearsal:
        change = (lambda x: x) if seed is None else _Disturbance(seed, self.epsilon)

        def value_of(variable: Any) -> jax.Array:
            return change(self._value_on_one(variable))

        twin = self._twin(self.one_device, value_of, rewrite)
        call = self.arguments.on_one_device(change, rows)
        with twin._use_mesh():
            return twin._replicator.rehearse(self.fn, *call, self.options)

    def _twin(self, mesh: ReplicaMesh, value_of: Callable[[Any], Any], rewrite: Any) -> Any:
        key = mesh, rewrite
        if key not in self._twins:
            twin = self.strategy._with_mesh(mesh)
            twin._twin_of = self.strategy
            twin.storage = self.strategy.storage if mesh == self.strategy.replica_mesh else None
            self._twins[key] = twin
        self._twins[key]._stand_in = StandIn(value_of, rewrite)
        return self._twins[key]

    def _value_on_one(self, variable: Any) -> jax.Array:
        held = getattr(variable, "held", None)
        if isinstance(held, PerReplica):
            rows = HostBatch.of(held).rows if held.rows is not None else fetch(held.array)[0]
            return put(self.one_device, rows[None])
        if variable.on_read:
            return put(self.one_device, _aggregate(variable, fetch(variable._value))[None])
        return put(self.one_device, variable._value)

    def _captures_batch(self, given: Rehearsal) -> str:
        for variable in given.traced.positions:
            if getattr(variable, "held", None) is not None:
                return f"the batch '{variable.name}'"
        return ""

    # Values.

    def _pairs(
        self, many: Rehearsal, one: Rehearsal, disturbed: list[Rehearsal]
    ) -> Iterator[Values]:
        others = {x.name: x for x in one.changes}
        noise = [{x.name: x for x in each.changes} for each in disturbed]
        for change in many.changes:
            other = others.get(change.name)
            if other is None or random_keys.is_key(change.after):
                continue
            variable = change.variable
            if variable is not None and variable.on_read:
                if variable.aggregation not in _AGGREGATED:
                    continue  # each replica has a value of its own
                new = _aggregate(variable, fetch(change.after))
                old, after = fetch(other.before)[0], fetch(other.after)[0]
                nearby = [x[change.name] for x in noise]
                near = [(fetch(x.before)[0], fetch(x.after)[0]) for x in nearby]
            else:
                new, old, after = fetch(change.after), fetch(other.before), fetch(other.after)
                nearby = [x[change.name] for x in noise]
                near = [(fetch(x.before), fetch(x.after)) for x in nearby]
            yield Values(change.name, change.output, old, after, near, new)
        yield from self._results(many, one, disturbed)

    def _results(
        self, many: Rehearsal, one: Rehearsal, disturbed: list[Rehearsal]
    ) -> Iterator[Values]:
        ours = jax.tree_util.tree_flatten_with_path(many.result, is_leaf=is_distributed)[0]
        theirs = jax.tree.leaves(one.result)
        noise = [jax.tree.leaves(x.result) for x in disturbed]
        if len(ours) != len(theirs):
            return
        for i, ((path, x), y) in enumerate(zip(ours, theirs, strict=True)):
            if many.traced.found.result[i][0] != "array" or random_keys.is_key(y):
                continue
            output = many.traced.found.result[i][1]
            leaf = f"result{jax.tree_util.keystr(path)}"
            before = None if i not in one.replaced else fetch(one.replaced[i])
            near = [
                (fetch(each.replaced[i]) if before is not None else None, fetch(values[i]))
                for each, values in zip(disturbed, noise, strict=True)
            ]
            if not isinstance(x, PerReplica):
                yield Values(leaf, output, before, fetch(y), near, fetch(x))
            elif x.rows is not None and not x.other_rows:
                yield Values(leaf, output, None, fetch(y), near, HostBatch.of(x).rows)
            elif before is not None and output in many.traced.drifting:
                if line := many.traced.drifting[output].where:  # a partial batch has lost it
                    self._lines.setdefault(leaf, line)
                yield Values(leaf, output, before, fetch(y), near, fetch(x.array), differs=True)
            else:
                self._not_compared.add(leaf)


class _Disturbance:
    """Changes floating-point arrays as much as rounding would."""

    def __init__(self, seed: int, epsilon: float):
        self._random, self._epsilon = np.random.default_rng(seed), epsilon

    def __call__(self, x: Any) -> Any:
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        signs = self._random.integers(0, 2, x.shape) * 2 - 1
        return x * jnp.asarray(1 + self._epsilon * signs, x.dtype)


def _aggregate(variable: Any, parts: np.ndarray) -> np.ndarray:
    """The value that the components of an ON_READ Variable stand for."""
    if variable.aggregation not in _AGGREGATED:
        return parts[0]
    return parts.sum(0) if variable.aggregation is VariableAggregation.SUM else parts.mean(0)


def _epsilon(closed: Any) -> float:
    """The relative rounding error of the least precise numbers of a program."""
    dtypes = {
        dtype
        for eqn in jaxprs.walk(closed)
        for x in eqn.outvars
        if jnp.issubdtype(dtype := getattr(x.aval, "dtype", jnp.int32), jnp.floating)
    }
    return max((float(jnp.finfo(x).eps) for x in dtypes), default=0.0)


def _positions(closed: Any) -> collections.Counter:
    """Returns the shapes of all position arrays (`iota`) that a program computes with."""
    return collections.Counter(
        eqn.params["shape"] for eqn in jaxprs.walk(closed) if eqn.primitive.name == "iota"
    )


def _partial_counts(n: int) -> Sequence[Callable[[int], list[int]]]:
    """Divisions of as many rows as one replica has over all: uneven, and with an empty replica."""

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
