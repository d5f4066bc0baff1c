"""One compiled step: a function for one kind of arguments, and what a call of it does.

A step is a `jax.jit` whose cache is keyed by shapes and shardings, around a Python body that runs
when that cache misses. The body traces the user's function once, proves what is equal on every
replica, and spreads the jaxpr over the mesh. A call that hits the cache feeds, dispatches and
writes back.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tpudist import context
from tpudist.goodput import goodput
from tpudist.lowering import compile, first_compile, placement
from tpudist.options import RunOptions
from tpudist.run import first_run, rehearsal, remarks
from tpudist.run.arguments import call_arguments, call_description, host_arrays, inputs, row_groups
from tpudist.run.arguments.inputs import Inputs
from tpudist.run.arguments.python_numbers import TraceFailed
from tpudist.run.captures import NewVariable
from tpudist.run.interrupt_hold import NO_HOLD, InterruptHold, interruptible
from tpudist.run.outputs import returned_state, special_values
from tpudist.run.outputs.results import Outcome, TracedStep
from tpudist.run.replica_call import ReplicaCall
from tpudist.run.step_plan import StepPlan
from tpudist.run.trace import trace_step
from tpudist.state import capture_search, missing_arrays
from tpudist.state.nnx_binding import Binding
from tpudist.values import drift
from tpudist.values.per_replica import is_per_replica
from tpudist.xla import compile_log, traces
from tpudist.xla.compiler import executables

_log = logging.getLogger("tpudist.compile")

MAX_SHAPES = 64
"""Of the arguments of one step, whose compiled programs are kept."""


class PlanOutdated(Exception):
    """A trace reads or writes state that the compiled call does not feed or take back yet."""


class ArgumentsChanged(Exception):
    """The cache of `jit` missed in a call whose arguments were not all looked at."""


class Step:
    """One function for one kind of arguments."""

    def __init__(
        self,
        owner: Any,
        function: Any,
        kinds_of_leaves: call_arguments.Kinds,
        structure: tuple,
        groups: row_groups.RowGroups | None,
        options: RunOptions,
    ):
        """Nothing is traced yet.

        Args:
            owner: The Replicator.
            function: Its record of the function, which names it and logs compiles.
            kinds_of_leaves: Of all flat arguments. Calls may have arrays in the place of numbers.
            structure: How these are nested.
            groups: Which arguments share their numbers of real rows.
            options: How to compile.
        """
        self.owner, self.function, self.mesh = owner, function, owner.mesh
        self.kinds_of_leaves, self.structure = kinds_of_leaves, structure
        self.groups, self.options = groups, options
        self._numbers_in_state = call_arguments.numbers_in_state(kinds_of_leaves, structure)
        self._throttle, self._compiles = owner.throttle, compile_log.backend_compiles()
        self._storage = owner.strategy.storage
        self._checks_each_call = first_run.checks_each_call(self.mesh)
        self._stands_in = owner.strategy._twin_of is not None
        self.captured: list[Any] = []
        self.written_variables: set[Any] = set()
        self.written_leaves: set[int] = set()
        self.traced: dict[Any, TracedStep] = {}
        self._given_back: set[int] = set()  # inputs after the Variables, for all that is traced
        self._checked_rows: set[Any] = set()
        self.local_leaves: frozenset[tuple[int, int]] = frozenset()  # see `local_state`
        self.needs_care = False  # arguments that must be moved to the mesh at each call
        # The call under way, for the trace that it may start.
        self._now: call_arguments.Call | None = None
        self._jitted: Callable | None = None
        self._plan: StepPlan | None = None  # there is one where there is a `jit`
        self._lowering = False  # nothing is moved then: not all of it may be within reach
        self._rehearses = False  # the warnings of its traces are left to the run then
        self._only_rehearsed: list[TracedStep] = []  # traces that have such warnings
        # Traced, but not agreed on with other processes: `jit` does not ask again for what was
        # lowered before.
        self._only_lowered: list[TracedStep] = []

    def __call__(self, now: call_arguments.Call) -> Any:
        """Makes the call: what the function returned, merged over the replicas."""
        start = time.perf_counter()
        outcome, compiled = self.attempt(now, self._dispatch)
        if compiled:
            self._record(time.perf_counter() - start, now)
            if len(self.traced) > MAX_SHAPES:
                self._forget_shapes()
        return outcome.traced.result(outcome.results, now)

    def _dispatch(self, donated: list[Any], kept: list[Any]) -> tuple[Outcome, bool]:
        """Starts the program and takes its state back: what it returns, and if it was compiled."""
        now = self._current_call()
        if now.rows:
            self.check_rows(now)
        if self._only_lowered:
            self._agree_on_lowered(now)
        if self._only_rehearsed:
            self._warn_of_rehearsed(now)
        if self._checks_each_call:
            first_run.agree_on_values(self.mesh, self.function.name, now)
        self._throttle.before_step(donated, kept)
        num_compiles = self._compiles.number
        assert self._plan is not None, "the inputs are made by it"
        with InterruptHold() if self._plan.state else NO_HOLD:
            try:
                goodput.begin_call()
                written, outcome = self._start(donated, kept)
            except (TypeError, ValueError) as error:
                if now.careful:
                    raise
                # An argument is no array, or is not on the mesh.
                raise ArgumentsChanged from error
            if outcome.traced.count_run is not None:
                outcome.traced.count_run()
            self.finish(written, now.binding, None if written else outcome.any_array())
        return outcome, self._compiles.number != num_compiles

    def _start(self, donated: list[Any], kept: list[Any]) -> tuple[list[Any], Outcome]:
        program, plan = self._jitted, self._plan
        assert program is not None, "the inputs are made for it"
        assert plan is not None, "there is one where there is a `jit`"
        missing_arrays.require_present(donated)
        if special_values.are_reported():
            calls = [self._current_call()]
            return special_values.call_checked(program, donated, [kept], plan.state, calls)
        return program(donated, kept)

    def _forget_shapes(self) -> None:
        """Gives up the programs of all shapes but the last one's: each takes megabytes."""
        _log.warning(
            "%s was compiled for more than %d shapes of its arguments. tpudist deletes these "
            "programs, and compiles them again if they are needed. Pad sequences to a few lengths.",
            self.function.name,
            MAX_SHAPES,
        )
        key, traced = self.traced.popitem()
        self.traced, self._jitted = {key: traced}, None
        self._checked_rows.clear()

    def check_rows(self, now: call_arguments.Call, *, is_rehearsal: bool = False) -> None:
        """Refuses, before anything is lost, numbers of rows that its program is not made for."""
        key = (is_rehearsal, now.rows, *(x.shape for x in now.elements if hasattr(x, "shape")))
        if key not in self._checked_rows:
            # The trace for these shapes, which is made here if `jit` has not asked for it yet.
            values = jax.tree.leaves(self._values(now))[len(self.captured) :]
            traced = self._trace(values)
            with self.owner.strategy._use_axis_rules():  # it may be traced for these rows
                traced.check_rows(now, is_rehearsal=is_rehearsal)
            self._checked_rows.add(key)

    def rehearse(self, now: call_arguments.Call) -> rehearsal.Rehearsal:
        """Runs the program on copies of the state, and returns the values that it computes."""

        def run_on_copies(donated: list[Any], kept: list[Any]) -> rehearsal.Rehearsal:
            if now.rows:
                self.check_rows(now, is_rehearsal=True)
            if self._only_lowered:
                self._agree_on_lowered(now)
            plan = self._plan
            assert plan is not None, "the inputs are made by it"
            inputs = plan.merge_inputs(donated, kept)
            written, outcome = self._start([x.copy() for x in donated], kept)
            traced = outcome.traced
            if traced.count_run is not None:
                traced.count_run()
            return rehearsal.Rehearsal(
                rehearsal.find_changes(plan, now.binding, traced.found, inputs, written),
                traced.result(outcome.results, now),
                rehearsal.find_replaced(traced, len(self.captured), inputs),
                traced,
            )

        self._rehearses = True
        try:
            return self.attempt(now, run_on_copies)
        finally:
            self._rehearses = False

    def trace(self, now: call_arguments.Call) -> tuple[TracedStep, list[Any]]:
        """Returns the trace of this call, which is not made, and the inputs of its program."""

        def take_inputs(donated: list[Any], kept: list[Any]) -> tuple[TracedStep, list[Any]]:
            assert self._plan is not None, "the inputs are made by it"
            inputs = self._plan.merge_inputs(donated, kept)
            traced = self._trace(inputs[len(self.captured) :])
            return traced, traced.inputs_of_program(self.captured, inputs)

        return self.attempt(now, take_inputs)

    def lower(self, now: call_arguments.Call) -> Any:
        """The lowered program of this call, which is not made."""
        return self.lower_with_inputs(now)[0]

    def lower_with_inputs(
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
        """Does `act` with the inputs of a call: anew if a trace finds that more are needed."""
        self._now = now  # callers hold the Replicator's lock
        try:
            while True:
                try:
                    return act(*self._feed(now))
                except PlanOutdated:
                    self._jitted = None
                except NewVariable as wanted:
                    self._jitted = None
                    wanted.provide(lambda: self._inputs_after_captured(now))
        finally:
            self._now = None

    def _feed(self, now: call_arguments.Call) -> tuple[list[Any], list[Any]]:
        """The inputs: those that are overwritten, and the others."""
        values = self._values(now)
        if now.careful:
            values = self._place(values, self._mark_stacked(now))
            if self._plan is not None and inputs.positions_on_host(values) != self._plan.on_host:
                self._jitted = None  # state was moved to another memory, or from there
        if self._jitted is None:
            if not now.careful:
                raise ArgumentsChanged
            values = self._prepare(values)
        if self.captured and not traces.is_eager():
            raise RuntimeError(
                f"'{self.function.name}' captures Variable '{self.captured[0].name}', and runs in "
                "a function that jax.jit (or another transformation) traces: the value would be "
                "frozen into that program. Call strategy.run outside of it, or pass the state as "
                "arguments."
            )
        plan = self._plan
        assert plan is not None, "`_prepare` makes it"
        arrays = plan.flatten(values, now.kinds)
        if arrays is None:
            assert not now.careful, now.kinds
            raise ArgumentsChanged
        has_host_arrays = host_arrays.are_among(arrays)
        if has_host_arrays or self._lowering:
            self._place_state(arrays, now)
        elif self._numbers_in_state:
            self._place_numbers(arrays)
        if has_host_arrays:
            arrays = host_arrays.take(arrays, now, self.function.name)
        if not plan.donated:
            return [], arrays
        donated, kept = plan.take_donated(arrays), plan.take_kept(arrays)
        plan.unshare(donated, kept, self.owner.strategy._protected)
        return donated, kept

    def _values(self, now: call_arguments.Call) -> list[Any]:
        """Captured Variables, then what `inputs.Inputs` orders, with plain pytrees whole."""
        values = (
            [v._value for v in self.captured] if not self._stands_in else self._values_of_captured()
        )
        if now.binding is not None:
            values += now.binding.values()
        if self._storage is not None:
            values = self._storage.fetch(values)
        kinds, elements = now.kinds, now.elements
        if kinds.only_arrays:
            values += elements
        elif now.rows:
            values += self._arguments(now)
        else:
            values += [elements[i].array if stacked else elements[i] for i, stacked in kinds.fed]
        return values

    def _arguments(self, now: call_arguments.Call) -> list[Any]:
        kinds, elements = now.kinds, now.elements
        if kinds.only_arrays and not now.rows:
            return elements
        values = [elements[i].array if stacked else elements[i] for i, stacked in kinds.fed]
        for real in now.rows:
            if self._lowering:
                values.append(placement.abstract_counts(self.mesh))
            else:
                values.append(placement.stack_counts(self.mesh, real))
        return values

    def _values_of_captured(self) -> list[Any]:
        return [self.owner.strategy._value_of(v) for v in self.captured]

    # For several calls in one program; see `step_loop`.

    @property
    def plan(self) -> StepPlan | None:
        """What is fed and taken back: the same object for as long as that does not change."""
        return self._plan

    def arguments_of(self, now: call_arguments.Call) -> list[Any]:
        """The flat inputs for the last argument of a call, with the counts of real rows."""
        last, _ = jax.tree.flatten(now.args[-1])
        number = len(last) + len(now.rows)
        if not number:
            return []
        values = self._arguments(now)
        return jax.tree.leaves(self._place(values[-number:]))[-number:]

    def wait_for_slot(self, inputs: Sequence[Any]) -> None:
        """Waits until one more program may be dispatched, which computes with these arrays."""
        self._throttle.before_step(inputs)

    def finish(self, written: list[Any], binding: Binding | None, output: Any) -> None:
        """Takes back the state that a program has written; `output` is any of its results."""
        if written:
            if self._storage is not None:
                written = self._storage.store(written)
            assert self._plan is not None, "a program has run by it"
            self._plan.write_back(written, binding, self.owner.strategy._protected)
            output = written[0]
        if output is not None:
            self._throttle.after_step(output)

    def _inputs_after_captured(self, now: call_arguments.Call) -> list[Any]:
        """The arrays that are fed beside the captured Variables."""
        first = len(self.captured)
        values, stacked = self._values(now)[first:], self._mark_stacked(now)[first:]
        return jax.tree.leaves(self._place(values, stacked))

    def _mark_stacked(self, now: call_arguments.Call) -> list[bool]:
        """For each of `_values`, whether it holds one part per replica."""
        num_nnx = len(now.binding.variables) if now.binding is not None else 0
        stacked = [v.on_read for v in self.captured] + [False] * num_nnx
        if now.kinds.only_arrays and not now.rows:
            return stacked + [False] * len(now.elements)
        return stacked + [s for _, s in now.kinds.fed] + [True] * len(now.rows)

    def _place(self, values: list[Any], stacked: Sequence[bool] | None = None) -> list[Any]:
        """Moves to the mesh what is elsewhere, to compile once and not per origin.

        Without `stacked`, which may be one part per replica, what is on its devices stays.
        """
        how = functools.partial(placement.prepare_step_input, self.mesh, abstract=self._lowering)

        def place(x: Any, *, is_stacked: bool) -> Any:
            if is_per_replica(x):  # in an NNX object or an nnx.State
                return jax.tree.map(functools.partial(how, is_stacked=True), x)
            return how(x, is_stacked=is_stacked)

        pairs = zip(values, stacked or [True] * len(values), strict=True)
        return [
            jax.tree.map(functools.partial(place, is_stacked=s), value, is_leaf=is_per_replica)
            for value, s in pairs
        ]

    def _current_call(self) -> call_arguments.Call:
        assert self._now is not None, "traces happen in calls only"
        return self._now

    # The program: made for what the trace reads and writes.

    def _prepare(self, values: list[Any]) -> list[Any]:
        """Traces if need be, and makes the plan and the `jit` for what the trace has found.

        Returns the values again, with those of the Variables that it reads.
        """
        now = self._current_call()
        if not self.traced:
            names = call_description.names_of_leaves(now.fn, now.args, now.kwargs)
            drift.check(now.leaves(), names, f"Strategy.run of '{self.function.name}'")
            self.inputs = Inputs.of(self.kinds_of_leaves, now.leaves(), now.binding, self.groups)
            self._trace(jax.tree.leaves(values))
            captured = self._values_of_captured()
            if self._storage is not None:
                captured = self._storage.fetch(captured)
                self._storage.take_in(now.binding)
            leaves, structure = jax.tree.flatten(captured + values)
            self._place_state(leaves, now)
            values = jax.tree.unflatten(structure, leaves)
        num_nnx = len(now.binding.variables) if now.binding is not None else 0
        plan = self._plan = StepPlan.of(
            values,
            self.captured,
            self.written_variables,
            self.written_leaves,
            self._positions_of_donated(now, len(self.captured) + num_nnx),
            self.donates_state,
            self.mesh,
        )

        def step(donated_arrays, kept_arrays):
            if not self._is_for(self._current_call()):
                raise ArgumentsChanged
            with interruptible():
                return self.body(plan.merge_inputs(donated_arrays, kept_arrays))

        step.__name__ = step.__qualname__ = self.function.name
        arrays = jax.tree.leaves(values)
        stacked = [v.on_read for v in self.captured] + list(self.inputs.stacked)
        options = plan.shardings(arrays, stacked, self.mesh) | self.compiler_options
        self._jitted = jax.jit(step, donate_argnums=0, **options)
        if self.function.loaded:
            both = plan.take_donated(arrays), plan.take_kept(arrays)
            lowered = self._jitted.trace(*both).lower()  # type: ignore[attr-defined]
            ready = [saved.executable_for(lowered) for saved in self.function.loaded]
            for compiled in filter(None, ready):
                self._jitted = executables.Precompiled(compiled, self._jitted)
        elif not self._lowering:
            program = self._trace(arrays[len(self.captured) :]).program.closed
            both = plan.take_donated(arrays), plan.take_kept(arrays)
            first_compile.try_program(program, self.mesh, self._jitted, both, self.function.name)
        return values

    def _place_state(self, arrays: list[Any], now: call_arguments.Call) -> None:
        """Puts on the mesh what is NumPy's or Python's among the flat inputs, and is state."""
        self._place_numbers(arrays)
        first = len(self.captured)
        given_back = [first + k for k in self._given_back]
        host_arrays.place_state(arrays, given_back, self.mesh, now, self.function.name)

    def _place_numbers(self, arrays: list[Any]) -> None:
        first = len(self.captured) + self.inputs.num_nnx
        positions = [first + k for k in self._numbers_in_state]
        host_arrays.place_numbers(arrays, positions, self.mesh, abstract=self._lowering)

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

    def _positions_of_donated(self, now: call_arguments.Call, first: int) -> list[int]:
        """Positions among the inputs of the donated arguments; arguments begin at `first`."""
        asked = self.options.donate_argnums
        call_arguments.check_positions(asked, "donate_argnums", self.function.name, len(now.args))
        if not asked:
            return []
        sizes = [
            len(self.function.flattener.elements((x,), {}, i)[0]) for i, x in enumerate(now.args)
        ]
        ends = np.cumsum([0, *sizes])
        elements = {e for i in asked for e in range(ends[i], ends[i + 1])}
        return [first + k for k, e in enumerate(now.kinds.dynamic) if e in elements]

    # The trace.

    def _is_for(self, now: call_arguments.Call) -> bool:
        """Whether all the arguments are nested and placed as this step wants them.

        Those that were not looked at yet included. Asked before a trace, which must not fail for
        that: `jit` sends a signature whose first trace failed through its slow path for ever.
        """
        if now.careful:
            return True
        leaves, structure = self.function.flattener.leaves(now.args, now.kwargs)
        if structure != self.structure:
            return False
        if now.binding is not None and not now.binding.has_same_values():
            return False
        numbers = self.kinds_of_leaves.numbers
        if call_arguments.Kinds.of(leaves, numbers) != self.kinds_of_leaves:
            return False
        if not all(call_arguments.is_number_or_array(leaves[i]) for i in numbers):
            return False
        values = jax.tree.leaves(self._values(now))
        return all(x is y for x, y in zip(self._place(values), values, strict=True))

    def body(self, values: list[Any]):
        """What `jit` traces: runs once per signature, when its cache misses."""
        traced = self._trace(values[len(self.captured) :])
        if not (
            traced.variables <= set(self.captured)
            and traced.written_variables <= self.written_variables
            and traced.written_leaves <= self.written_leaves
        ) or len(values) != len(self.captured) + len(self.inputs.stacked):
            raise PlanOutdated
        self._agree(traced)
        plan = self._plan
        assert plan is not None

        def place_outputs(results, returned):
            return returned_state.keep_places(results, returned, plan.places[len(self.captured) :])

        # What is aggregated at the end of the step asks the strategy in charge how.
        with context.enter(context.Mode(context.ContextKind.SCOPE, self.owner.strategy)):
            return traced.emit(self.mesh, self.captured, values, plan.state, place_outputs)

    def _agree(self, traced: TracedStep) -> None:
        """Lets the other processes know what is about to run first; raises if theirs differs."""
        if traced.count_run is not None or self.mesh.num_processes == 1:
            return
        if self._lowering:
            self._only_lowered.append(traced)
            return
        now = self._current_call()
        closed = traced.program.closed
        traced.count_run = first_run.agree_on_program(self.mesh, self.function.name, now, closed)

    def _agree_on_lowered(self, now: call_arguments.Call) -> None:
        traced = self._trace_again(now)
        if traced in self._only_lowered:
            self._only_lowered.remove(traced)
            self._agree(traced)

    def _warn_of_rehearsed(self, now: call_arguments.Call) -> None:
        traced = self._trace_again(now)
        if traced in self._only_rehearsed:
            self._only_rehearsed.remove(traced)
            remarks.warn_once(traced.remarks, self.function.findings.remarks)

    def _trace_again(self, now: call_arguments.Call) -> TracedStep:
        return self._trace(jax.tree.leaves(self._values(now))[len(self.captured) :])

    def _trace(self, rest: Sequence[Any]) -> TracedStep:
        """The traced step for the shapes of what is fed beside Variables; traces at most once."""
        findings = self.function.findings
        shapes = [x if hasattr(x, "shape") else compile.shape_of(x) for x in rest]
        key = tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in shapes)
        key += traces.settings()
        if findings.captures:
            key += tuple((c._value.shape, c._value.dtype) for c in findings.captures)
        traced = self.traced.get(key)
        if traced is not None:
            return traced
        now = self._current_call()
        captured = capture_search.find(now.fn)
        with self.owner.strategy._use_axis_rules(), self._explain_failure(now):
            traced = trace_step(
                ReplicaCall(
                    strategy=self.owner.strategy,
                    name=self.function.name,
                    fn=now.fn,
                    structure=self.structure,
                    num_args=len(now.args),
                    leaves=now.leaves(),
                    kinds=self.kinds_of_leaves,
                    binding=now.binding,
                    inputs=self.inputs,
                    donated_leaves=call_arguments.leaves_of(
                        self.options.donate_argnums, self.structure
                    ),
                    findings=findings,
                    whole=self.function.whole,
                    rules=self.options.aggregation,
                ),
                rest,
                lambda: call_description.names_of_leaves(now.fn, now.args, now.kwargs),
            )
        stand_in = self.owner.strategy._stand_in
        if stand_in is not None and stand_in.rewrite is not None:
            traced = rehearsal.rewrite(traced, stand_in.rewrite, self.function.name)
        self.function.captured.add(captured, now.fn)
        self.traced[key] = traced
        self._given_back.update(traced.returned.values())
        known = set(self.captured)
        self.captured += [v for v in traced.variable_order if v not in known]
        self.written_variables |= traced.written_variables
        self.written_leaves |= traced.written_leaves
        if not self._rehearses:
            remarks.warn_once(traced.remarks, findings.remarks)
        elif traced.remarks:
            self._only_rehearsed.append(traced)
        return traced

    @contextlib.contextmanager
    def _explain_failure(self, now: call_arguments.Call) -> Iterator[None]:
        """Says of a trace that fails which Python number may be why; see `python_numbers`."""
        try:
            yield
        except Exception as error:
            numbers = self.kinds_of_leaves.numbers
            if not numbers:
                raise
            variables = self.owner.strategy._list_variables()
            first = len(variables) + len(self.function.findings.captures) + self.inputs.num_nnx
            leaves = [-1] * first + list(self.inputs.leaves_of_arguments)
            raise TraceFailed.of(error, now.leaves(), numbers, leaves) from error

    def _record(self, seconds: float, now: call_arguments.Call) -> None:
        leaves = now.leaves()
        signature = call_description.describe_call(
            now.fn,
            now.args,
            now.kwargs,
            leaves,
            self.options,
            [i for i in self.kinds_of_leaves.numbers if call_arguments.is_number(leaves[i])],
        )
        self.function.record(signature | self.function.captured.describe(), seconds)
