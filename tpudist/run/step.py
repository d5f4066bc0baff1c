"""One compiled step: a function for one kind of arguments, and what a call of it does.

A step is a `jax.jit` whose cache is keyed by shapes and shardings, around a Python body that runs
when that cache misses. The body traces the user's function once, proves what is equal on every
replica, and spreads the jaxpr over the mesh. A call that hits the cache feeds, dispatches and
writes back.
"""

import functools
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tpudist import context
from tpudist.options import RunOptions
from tpudist.run import call_arguments, call_description, inputs, row_groups
from tpudist.run.captures import NewVariable
from tpudist.run.inputs import Inputs
from tpudist.run.results import TracedStep
from tpudist.run.trace import trace_step
from tpudist.state import nnx_binding
from tpudist.xla import compile_log, executables, placement, traces

_is = operator.is_


class Replan(Exception):
    """A trace reads or writes state that the compiled call does not feed or take back yet."""


class LookAgain(Exception):
    """The cache of `jit` missed in a call whose arguments were not all looked at."""


class Step:
    """One function for one kind of arguments."""

    def __init__(
        self,
        owner: Any,
        function: Any,
        kinds: call_arguments.Kinds,
        kinds_of_leaves: call_arguments.Kinds,
        structure: tuple,
        groups: row_groups.RowGroups | None,
        options: RunOptions,
    ):
        """Nothing is traced yet.

        Args:
            owner: The Replicator.
            function: Its record of the function, which names it and logs compiles.
            kinds: Of what is fed for the arguments.
            kinds_of_leaves: Of all flat arguments.
            structure: How these are nested.
            groups: Which arguments share their numbers of real rows.
            options: How to compile.
        """
        self.owner, self.function, self.mesh = owner, function, owner.mesh
        self.kinds, self.kinds_of_leaves, self.structure = kinds, kinds_of_leaves, structure
        self.groups, self.options = groups, options
        self._throttle, self._compiles = owner.throttle, compile_log.backend_compiles()
        self._storage = owner.strategy.storage
        self._stands_in = owner.strategy.twin_of is not None
        self.captured: list[Any] = []
        self.written_variables: set[Any] = set()
        self.written_leaves: set[int] = set()
        self.traced: dict[Any, TracedStep] = {}
        self.needs_care = False  # arguments that must be moved to the mesh at each call
        # The call under way, for the trace that it may start.
        self._now: call_arguments.Call | None = None
        self._jitted: Callable | None = None
        self._lowering = False  # nothing is moved then: not all of it may be within reach
        self._state: list[tuple[str, Any, int]] = []

    def __call__(self, now: call_arguments.Call) -> Any:
        """Makes the call: what the function returned, merged over the replicas."""
        start = time.perf_counter()
        self._now = now  # callers hold the Replicator's lock
        try:
            while True:
                try:
                    donated, kept = self._feed(now)
                    self._throttle.before_step()
                    num_compiles = self._compiles.number
                    try:
                        written, outcome = self._jitted(donated, kept)  # type: ignore[misc]
                    except (TypeError, ValueError) as error:
                        if now.careful:
                            raise
                        # An argument is no array, or is not on the mesh.
                        raise LookAgain from error
                    break
                except Replan:
                    self._jitted = None
                except NewVariable as wanted:
                    self._jitted = None
                    wanted.provide(lambda: self._rest(now))
        finally:
            self._now = None
        if self._compiles.number != num_compiles:
            self._record(time.perf_counter() - start, now)
        # As `finish`, which would be a call more.
        if written:
            if self._storage is not None:
                written = self._storage.store(written)
            self._write_back(written, now.binding)
        output = written[0] if written else outcome.any_array()
        if output is not None:
            self._throttle.after_step(output)
        return outcome.traced.result(outcome.results, now)

    def lower(self, now: call_arguments.Call) -> Any:
        """The lowered program of this call, which is not made."""
        return self.lowered(now)[0]

    def lowered(
        self, now: call_arguments.Call, traced: Callable[[], None] = lambda: None
    ) -> tuple[Any, list[Any], list[Any]]:
        """The lowered program of this call, and its flat inputs: the overwritten, and the others.

        `traced` is called between tracing and lowering.
        """

        def lower(donated, kept):
            program = self._jitted.trace(donated, kept)  # type: ignore[union-attr]
            traced()
            return program.lower(), donated, kept

        self._lowering = True
        try:
            return self.attempt(now, lower)
        finally:
            self._lowering = False

    def attempt(self, now: call_arguments.Call, act: Callable[[list[Any], list[Any]], Any]) -> Any:
        """Does `act` with the inputs of a call: anew if a trace finds that more are needed.

        As `__call__` does, which has no function call to spare.
        """
        self._now = now  # callers hold the Replicator's lock
        try:
            while True:
                try:
                    return act(*self._feed(now))
                except Replan:
                    self._jitted = None
                except NewVariable as wanted:
                    self._jitted = None
                    wanted.provide(lambda: self._rest(now))
        finally:
            self._now = None

    def _feed(self, now: call_arguments.Call) -> tuple[list[Any], list[Any]]:
        """The inputs: those that are overwritten, and the others."""
        values = self._values(now)
        if now.careful:
            values = self._placed(values, self._are_stacked(now))
            if self._jitted is not None and inputs.on_host(values) != self._elsewhere:
                self._jitted = None  # state was moved to another memory, or from there
        if self._jitted is None:
            if not now.careful:
                raise LookAgain
            values = self._plan(values)
        if self.captured and not traces.tracing_nothing():
            raise RuntimeError(
                f"'{self.function.name}' captures Variable '{self.captured[0].name}', and is run "
                f"in a function that jax.jit (or another transformation) traces: the value would "
                f"be frozen into that program. Call strategy.run outside of it, or pass the state "
                f"as arguments."
            )
        # Flattened once: `jit` would do it again, and a dict of 300 arrays takes 0.1 ms each time.
        if self._only_arrays:
            arrays = values
        else:
            arrays, nesting = jax.tree.flatten(values)
            if nesting != self._nesting:
                assert not now.careful, (nesting, self._nesting)
                raise LookAgain
        if not self._donated:
            return [], arrays
        donated, kept = self._take_donated(arrays), self._take_kept(arrays)
        self._unshare(donated, kept)
        return donated, kept

    def _values(self, now: call_arguments.Call) -> list[Any]:
        """Captured Variables, then what `inputs.Inputs` orders, with plain pytrees whole."""
        values = [v._value for v in self.captured] if not self._stands_in else self._captured()
        if now.binding is not None:
            values += now.binding.values()
        if self._storage is not None:
            values = self._storage.fetch(values)
        kinds, elements = self.kinds, now.elements
        if kinds.only_arrays:
            values += elements
        elif now.rows:
            values += self._arguments(now)
        else:
            values += [elements[i].array if stacked else elements[i] for i, stacked in kinds.fed]
        return values

    def _arguments(self, now: call_arguments.Call) -> list[Any]:
        kinds, elements = self.kinds, now.elements
        if kinds.only_arrays and not now.rows:
            return elements
        values = [elements[i].array if stacked else elements[i] for i, stacked in kinds.fed]
        for real in now.rows:
            if self._lowering:
                values += placement.abstract_counts(self.mesh)
                continue
            values.append(placement.stacked_counts(self.mesh, real))
            values.append(placement.count(self.mesh, sum(real)))
        return values

    def _captured(self) -> list[Any]:
        return [self.owner.strategy.value_of(v) for v in self.captured]

    # For several calls in one program; see `step_loop`.

    @property
    def plan(self) -> Any:
        """An object that is the same for as long as the same state is fed and taken back."""
        return self._jitted

    @property
    def state_positions(self) -> list[int]:
        """Which flat inputs are replaced by what the step writes, in the order of the written."""
        return [position for _, _, position in self._state]

    def in_order(self, donated: list[Any], kept: list[Any]) -> list[Any]:
        """The flat inputs, of which `donated` are those that are overwritten."""
        values: list[Any] = [None] * (len(donated) + len(kept))
        rest = sorted(set(range(len(values))) - set(self._donated))
        for i, x in zip([*self._donated, *rest], [*donated, *kept], strict=True):
            values[i] = x
        return values

    def arguments_of(self, now: call_arguments.Call) -> list[Any]:
        """The flat inputs for the last argument of a call, with the counts of real rows."""
        last, _ = jax.tree.flatten(now.args[-1])
        number = len(last) + 2 * len(now.rows)
        if not number:
            return []
        values = self._arguments(now)
        return jax.tree.leaves(self._placed(values[-number:]))[-number:]

    def before_dispatch(self) -> None:
        """Waits until one more program may be dispatched."""
        self._throttle.before_step()

    def finish(self, written: list[Any], binding: Any, output: Any) -> None:
        """Takes back the state that a program has written; `output` is any of its results."""
        if written:
            if self._storage is not None:
                written = self._storage.store(written)
            self._write_back(written, binding)
            output = written[0]
        if output is not None:
            self._throttle.after_step(output)

    def _rest(self, now: call_arguments.Call) -> list[Any]:
        """The arrays that are fed beside the captured Variables."""
        first = len(self.captured)
        values, stacked = self._values(now)[first:], self._are_stacked(now)[first:]
        return jax.tree.leaves(self._placed(values, stacked))

    def _are_stacked(self, now: call_arguments.Call) -> list[bool]:
        """For each of `_values`, whether it holds one part per replica."""
        num_nnx = len(now.binding.variables) if now.binding is not None else 0
        stacked = [v.on_read for v in self.captured] + [False] * num_nnx
        if self.kinds.only_arrays and not now.rows:
            return stacked + [False] * len(now.elements)
        return stacked + [s for _, s in self.kinds.fed] + [True, False] * len(now.rows)

    def _placed(self, values: list[Any], stacked: Sequence[bool] | None = None) -> list[Any]:
        """Moves to the mesh what is elsewhere, to compile once and not per origin.

        Without `stacked`, which may be one part per replica, what is on its devices stays.
        """
        how = functools.partial(placement.as_steps_take_it, self.mesh, abstract=self._lowering)
        pairs = zip(values, stacked or [True] * len(values), strict=True)
        return [jax.tree.map(functools.partial(how, is_stacked=s), value) for value, s in pairs]

    def _unshare(self, donated: list[Any], kept: list[Any]) -> None:
        """Copies what must not be overwritten: values in two places, or read by the user."""
        # XLA:CPU crashes on a buffer that is donated twice.
        if len({*map(id, donated), *map(id, kept)}) != len(donated) + len(kept):
            seen = set(map(id, kept))
            for i, x in enumerate(donated):
                if id(x) in seen and isinstance(x, jax.Array):
                    donated[i] = x.copy()
                seen.add(id(x))
        lent = self.owner.strategy.lent
        if lent:
            for i, v in enumerate(self.captured):
                if v in lent and v in self.written_variables:
                    if i in self._donated:
                        position = self._donated.index(i)
                        donated[position] = donated[position].copy()

    def _write_back(self, written: list[Any], binding) -> None:
        variables = self._written_captured
        for v, value in zip(variables, written, strict=False):
            v._value = value
        lent = self.owner.strategy.lent
        if lent:
            lent.difference_update(variables)  # nobody has read the new arrays
        if self._written_nnx:
            rest = written[len(variables) :]
            if len(rest) != len(self._written_nnx):  # a Variable holds a pytree of arrays
                raw = binding.values()
                held = jax.tree.structure([raw[i] for i in self._written_nnx])
                rest = held.unflatten(rest)
            nnx_binding.write([binding.variables[i] for i in self._written_nnx], rest)

    def _under_way(self) -> call_arguments.Call:
        assert self._now is not None, "traces happen in calls only"
        return self._now

    # The plan: what is fed, what is overwritten.

    def _plan(self, values: list[Any]) -> list[Any]:
        """Traces if need be, and makes the jit for what the trace reads and writes.

        Returns the inputs again, with those that the trace found.
        """
        now = self._under_way()
        if not self.traced:
            self.inputs = Inputs.of(
                self.kinds_of_leaves, now.leaves(), now.binding, self.groups, now.rows
            )
            self._trace(jax.tree.leaves(values))
            captured = self._captured()
            if self._storage is not None:
                captured = self._storage.fetch(captured)
                self._storage.take_in(now.binding)
            values = captured + values
        num_captured = len(self.captured)
        self._state = [
            ("variable", v, i) for i, v in enumerate(self.captured) if v in self.written_variables
        ]
        self._written_captured = [v for _, v, _ in self._state]
        self._written_nnx = sorted(self.written_leaves)
        arrays, self._nesting = jax.tree.flatten(values)
        self._elsewhere = inputs.on_host(arrays)
        self._only_arrays = len(arrays) == len(values) and all(map(_is, arrays, values))
        flat = inputs.positions(values)
        first_nnx = num_captured
        self._state += [
            ("nnx", (i, j), position)
            for i in self._written_nnx
            for j, position in enumerate(flat[first_nnx + i])
        ]
        # Elements may be whole pytrees; what is fed are arrays.
        state = [
            *(i for i, v in enumerate(self.captured) if v in self.written_variables),
            *(first_nnx + i for i in self._written_nnx),
        ]
        num_nnx = len(now.binding.variables) if now.binding is not None else 0
        overwritten = [
            *(state if self.donates_state else []),
            *self._donated_arguments(now, num_captured + num_nnx),
        ]
        donated = [k for i in overwritten for k in flat[i]]
        kept = sorted(set(range(len(arrays))) - set(donated))
        self._donated = donated
        self._take_donated, self._take_kept = inputs.taker(donated), inputs.taker(kept)
        order = np.argsort([*donated, *kept]).tolist()

        def step(donated_arrays, kept_arrays):
            if not self._is_for(self._under_way()):
                raise LookAgain
            both = [*donated_arrays, *kept_arrays]
            return self.body([both[i] for i in order])

        step.__name__ = step.__qualname__ = self.function.name
        options: dict[str, Any] = {}
        if self.mesh.devices_per_replica == 1:
            stacked = [v.on_read for v in self.captured] + list(self.inputs.stacked)
            where = [
                placement.in_memory_of(x, self.mesh.stacked if s else self.mesh.replicated)
                for x, s in zip(arrays, stacked, strict=True)
            ]
            options["in_shardings"] = ([where[i] for i in donated], [where[i] for i in kept])
        written = [k for i in state for k in flat[i]]
        if self.mesh.devices_per_replica > 1 or any(placement.on_host(arrays[k]) for k in written):
            options["out_shardings"] = (
                [inputs.pinned(arrays[k], self.mesh) for k in written],
                None,
            )
        options |= self.compiler_options
        self._jitted = jax.jit(step, donate_argnums=0, **options)
        if self.function.loaded:
            both = [arrays[i] for i in donated], [arrays[i] for i in kept]
            lowered = self._jitted.trace(*both).lower()  # type: ignore[attr-defined]
            ready = [saved.compiled_for(lowered) for saved in self.function.loaded]
            for compiled in filter(None, ready):
                self._jitted = executables.Ahead(compiled, self._jitted)
        return values

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What to tell XLA, as keyword arguments of `jit`."""
        options = dict(self.owner.strategy.compiler_options)
        options.update(self.function.findings.compiler_options)
        options.update(self.options.experimental_xla_options or ())
        return {"compiler_options": options} if options else {}

    @property
    def donates_state(self) -> bool:
        """Whether the arrays of old state are given to XLA to be overwritten."""
        shared = self._storage is not None and self._storage.shares_memory
        return self.options.donate_state and not shared

    def _donated_arguments(self, now: call_arguments.Call, first: int) -> list[int]:
        """Positions among the inputs of the donated arguments; arguments begin at `first`."""
        asked = self.options.donate_argnums
        bad = [i for i in asked if not 0 <= i < len(now.args)]
        if bad:
            raise ValueError(
                f"RunOptions(donate_argnums={asked}) was asked for, but '{self.function.name}' was "
                f"given {len(now.args)} positional argument(s). Name positions from 0 to "
                f"{len(now.args) - 1}."
            )
        if not asked:
            return []
        sizes = [
            len(self.function.flattener.elements((x,), {}, i)[0]) for i, x in enumerate(now.args)
        ]
        ends = np.cumsum([0, *sizes])
        elements = {e for i in asked for e in range(ends[i], ends[i + 1])}
        return [first + k for k, e in enumerate(self.kinds.dynamic) if e in elements]

    # The trace.

    def _is_for(self, now: call_arguments.Call) -> bool:
        """Whether all the arguments are nested and placed as this step wants them.

        Those that were not looked at yet included. Asked before a trace, which must not fail for
        that: `jit` sends a signature whose first trace failed through its slow path for ever.
        """
        if now.careful:
            return True
        leaves, structure = self.function.flattener.leaves(now.args, now.kwargs)
        if structure != self.structure or call_arguments.Kinds.of(leaves) != self.kinds_of_leaves:
            return False
        values = jax.tree.leaves(self._values(now))
        return all(x is y for x, y in zip(self._placed(values), values, strict=True))

    def body(self, values: list[Any]):
        """What `jit` traces: runs once per signature, when its cache misses."""
        traced = self._trace(values[len(self.captured) :])
        if not (
            traced.variables <= set(self.captured)
            and traced.written_variables <= self.written_variables
            and traced.written_leaves <= self.written_leaves
        ) or len(values) != len(self.captured) + len(self.inputs.stacked):
            raise Replan
        with context.entered(context.Mode(self.owner.strategy)):  # which says how to all-reduce
            return traced.emit(self.mesh, self.captured, values, self._state)

    def _trace(self, rest: Sequence[Any]) -> TracedStep:
        """The traced step for the shapes of what is fed beside Variables; traces at most once."""
        findings = self.function.findings
        key = tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in rest)
        if findings.captures:
            key += tuple((c._value.shape, c._value.dtype) for c in findings.captures)
        traced = self.traced.get(key)
        if traced is not None:
            return traced
        now = self._under_way()
        with self.owner.strategy.axis_rules():
            traced = trace_step(
                self.owner.strategy,
                self.function.name,
                now.fn,
                self.structure,
                len(now.args),
                self.kinds_of_leaves,
                now.leaves(),
                now.binding,
                self.inputs,
                rest,
                lambda: call_description.names_of_leaves(now.fn, now.args, now.kwargs),
                call_arguments.leaves_of(self.options.donate_argnums, self.structure),
                findings,
                self.function.whole,
            )
        self.traced[key] = traced
        known = set(self.captured)
        self.captured += [v for v in traced.variable_order if v not in known]
        self.written_variables |= traced.written_variables
        self.written_leaves |= traced.written_leaves
        return traced

    def _record(self, seconds: float, now: call_arguments.Call) -> None:
        self.function.record(
            call_description.of_call(now.fn, now.args, now.kwargs, now.leaves(), self.options),
            seconds,
        )
