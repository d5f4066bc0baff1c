"""The compiled program of a step: its `jit`, and the flat inputs that a call feeds to it.

`feed` is on the path of every call. All else runs when something about the inputs is new.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.lowering import first_compile, placement
from tpudist.run.arguments import (
    argument_checks,
    call_arguments,
    call_description,
    host_arrays,
    inputs,
)
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.run.arguments.inputs import Inputs
from tpudist.run.dispatch.interrupt_hold import interruptible
from tpudist.run.dispatch.step_plan import StepPlan
from tpudist.run.outputs import returned_state
from tpudist.run.outputs.results import Outcome, TracedStep
from tpudist.run.step_signature import StepSignature
from tpudist.run.step_traces import StepTraces
from tpudist.values import drift
from tpudist.values.per_replica import is_per_replica
from tpudist.xla import traces as jax_traces
from tpudist.xla.compiler import executables


class PlanOutdated(Exception):
    """A trace reads or writes state that the compiled call does not feed or take back yet."""


class ArgumentsChanged(Exception):
    """The cache of `jit` missed in a call whose arguments were not all checked."""


class StepProgram:
    """The program of one step, for all shapes of its arguments.

    `jit` has a cache of its own, keyed by shapes, dtypes and shardings. When it misses, it calls
    `body`, which finds the trace for the shapes and spreads it over the mesh.

    Attributes:
        call: The call in progress, for the trace that it may start; None between calls. A steady
            call leaves the arguments of `RunCall` here, since few calls start a trace.
        plan: Order and donation of the inputs, and the state to write back; None before the first
            call. It is the same object as long as none of that changes.
        jitted: The compiled function of donated and kept inputs; None if it must be created.
        moves_arguments: Whether the last checked call had arguments that had to move to the mesh.
            The next call probably has, too, so it is checked.
        is_lowering: Whether the call in progress is only lowered. Its inputs may be shapes, and its
            devices may not exist here, so nothing is moved.
        inputs: The order of the flat inputs after the captured ones; set by the first trace.
    """

    inputs: Inputs

    def __init__(self, signature: StepSignature, traces: StepTraces):
        self._signature, self.traces = signature, traces
        self._strategy, self._mesh = signature.strategy, signature.mesh
        self._storage = self._strategy.storage
        self._is_twin = self._strategy._twin_of is not None
        self.numbers_in_state = call_arguments.numbers_in_state(
            signature.kinds, signature.structure
        )
        self.call: RunCall | tuple[Any, ...] | None = None
        self.plan: StepPlan | None = None
        self.jitted: jax.stages.Wrapped | executables.Precompiled | None = None
        self.moves_arguments = False
        self.is_lowering = False

    def feed(self, call: RunCall) -> tuple[list[Any], list[Any]]:
        """Returns the inputs of a call: the donated ones, which are overwritten, and the kept ones.

        A checked call creates `plan` and `jitted` if they are missing, and moves its inputs to the
        mesh. An unchecked call is fed as it is: `plan.flatten` compares its nesting, `jit` its
        shapes, dtypes and shardings.

        Raises:
            ArgumentsChanged: If the call was not checked, and has arguments of another kind.
        """
        values = self.values(call)
        if call.is_checked:
            placed = self._place(values, self._mark_stacked(call))
            self.moves_arguments = not _have_same_arrays(placed, values)
            values = placed
            if self.plan is not None and inputs.positions_on_host(values) != self.plan.on_host:
                # State has moved to another memory, or back: `in_shardings` would not match.
                self.jitted = None
        if self.jitted is None:
            if not call.is_checked:
                raise ArgumentsChanged
            values = self._prepare(values, call)
        if self.traces.captured and not jax_traces.is_eager():
            raise RuntimeError(
                f"'{self._signature.function.name}' captures Variable "
                f"'{self.traces.captured[0].name}', and runs in a function that jax.jit (or "
                "another transformation) traces: the value would be frozen into that program. Call "
                "strategy.run outside of it, or pass the state as arguments."
            )
        plan = self.plan
        assert plan is not None, "`_prepare` creates it"
        arrays = plan.flatten(values, call.kinds)
        if arrays is None:
            assert not call.is_checked, call.kinds
            raise ArgumentsChanged
        has_host_arrays = host_arrays.are_among(arrays)
        if has_host_arrays or self.is_lowering:
            self._place_state(arrays, call)
        elif self.numbers_in_state:
            self._place_numbers(arrays)
        if has_host_arrays:
            arrays = host_arrays.copy_small_arrays(arrays, call, self._signature.function.name)
        if not plan.donated:
            return [], arrays
        donated, kept = plan.take_donated(arrays), plan.take_kept(arrays)
        # Last, when nothing replaces arrays any more: it compares them by identity.
        plan.unshare(donated, kept, self._strategy._protected)
        return donated, kept

    def values(self, call: RunCall) -> list[PyTree]:
        """Returns the inputs before flattening: captured values, NNX leaves, arguments, rows."""
        # The order is that of `Inputs` and `StepPlan`. Plain pytrees are one value each: flattening
        # them here would cost each call, and `StepPlan.flatten` knows when it is not needed.
        values = (
            [v._value for v in self.traces.captured]
            if not self._is_twin
            else self._values_of_captured()
        )
        if call.binding is not None:
            values += call.binding.values()
        if self._storage is not None:
            values = self._storage.fetch(values)
        # The common cases of `_values_of_arguments`, inlined: one function call less per step.
        kinds, elements = call.kinds, call.elements
        if kinds.only_arrays:
            values += elements
        elif call.rows:
            values += self._values_of_arguments(call)
        else:
            values += [elements[i].array if stacked else elements[i] for i, stacked in kinds.fed]
        return values

    def _values_of_arguments(self, call: RunCall) -> list[PyTree]:
        kinds, elements = call.kinds, call.elements
        if kinds.only_arrays:  # and so no PerReplicas, whose rows are counted
            return elements
        values = [elements[i].array if stacked else elements[i] for i, stacked in kinds.fed]
        for real_rows in call.rows:
            if self.is_lowering:
                values.append(placement.abstract_counts(self._mesh))
            else:
                values.append(placement.stack_counts(self._mesh, real_rows))
        return values

    def _values_of_captured(self) -> list[Any]:
        return [self._strategy._value_of(v) for v in self.traces.captured]

    def call_inputs(self, call: RunCall) -> list[Any]:
        """Returns the flat inputs of a call after the captured ones, where they are."""
        return jax.tree.leaves(self.values(call))[len(self.traces.captured) :]

    def place_call_inputs(self, call: RunCall) -> list[Any]:
        """Returns the flat inputs of a call after the captured ones, moved to the mesh."""
        first = len(self.traces.captured)
        values, stacked = self.values(call)[first:], self._mark_stacked(call)[first:]
        return jax.tree.leaves(self._place(values, stacked))

    def arrays_of_last_argument(self, call: RunCall) -> list[Any]:
        """Returns the flat inputs for the last argument of a call, and the counts of real rows."""
        last, _ = jax.tree.flatten(call.args[-1])
        number = len(last) + len(call.rows)
        if not number:
            return []
        # First by values, so that only these move; then by arrays, since the value that contains
        # the last argument may be a pytree that begins with other arguments.
        values = self._values_of_arguments(call)
        return jax.tree.leaves(self._place(values[-number:]))[-number:]

    # Placement of inputs that are not on the mesh.

    def _mark_stacked(self, call: RunCall) -> list[bool]:
        """Returns for each of `values` whether it has one part per replica."""
        num_nnx = len(call.binding.variables) if call.binding is not None else 0
        stacked = [v.on_read for v in self.traces.captured] + [False] * num_nnx
        if call.kinds.only_arrays:
            return stacked + [False] * len(call.elements)
        return stacked + [is_stacked for _, is_stacked in call.kinds.fed] + [True] * len(call.rows)

    def _place(self, values: list[PyTree], stacked: Sequence[bool] | None = None) -> list[PyTree]:
        """Moves arrays from elsewhere to the mesh, to compile once and not once per origin."""
        # Without `stacked`, any value may have one part per replica, so arrays on the devices of
        # the mesh stay as they are.
        prepare = functools.partial(
            placement.prepare_step_input, self._mesh, abstract=self.is_lowering
        )

        def place(x: Any, *, is_stacked: bool) -> Any:
            if is_per_replica(x):  # in an NNX object or an nnx.State
                return jax.tree.map(functools.partial(prepare, is_stacked=True), x)
            return prepare(x, is_stacked=is_stacked)

        pairs = zip(values, stacked or [True] * len(values), strict=True)
        return [
            jax.tree.map(functools.partial(place, is_stacked=s), value, is_leaf=is_per_replica)
            for value, s in pairs
        ]

    def _place_state(self, arrays: list[Any], call: RunCall) -> None:
        """Moves NumPy arrays and Python numbers that are state to the mesh, in place."""
        self._place_numbers(arrays)
        first = len(self.traces.captured)
        returned = [first + k for k in self.traces.returned]
        host_arrays.place_state(arrays, returned, self._mesh, call, self._signature.function.name)

    def _place_numbers(self, arrays: list[Any]) -> None:
        first = len(self.traces.captured) + self.inputs.num_nnx
        positions = [first + k for k in self.numbers_in_state]
        host_arrays.place_numbers(arrays, positions, self._mesh, abstract=self.is_lowering)

    # Creation of the plan and of the `jit`.

    def _prepare(self, values: list[PyTree], call: RunCall) -> list[PyTree]:
        """Creates the plan and the `jit`; returns the values, with those of captured Variables."""
        traces = self.traces
        # The first call traces here, outside of `jit`, because the plan needs to know which state
        # the function reads and writes. `jit` then finds that trace in `StepTraces`.
        if not traces.by_signature:
            values = self._trace_first(values, call)
        num_nnx = len(call.binding.variables) if call.binding is not None else 0
        plan = self.plan = StepPlan.of(
            values,
            traces.captured,
            traces.written_variables,
            traces.written_leaves,
            self._positions_of_donated(call, len(traces.captured) + num_nnx),
            self.donates_state,
            self._mesh,
        )

        # `jit` calls this when its cache misses. `_is_for` comes before the trace: a trace of wrong
        # arguments might fail, and `jit` sends a signature whose first trace failed through its
        # slow path forever. `planner.input_roles` finds inputs in the HLO by the names of the two
        # parameters.
        def step(donated_arrays, kept_arrays):
            if not self._is_for(self._current_call()):
                raise ArgumentsChanged
            with interruptible():
                return self.body(plan.merge_inputs(donated_arrays, kept_arrays))

        step.__name__ = step.__qualname__ = self._signature.function.name
        arrays = jax.tree.leaves(values)
        stacked = [v.on_read for v in traces.captured] + list(self.inputs.stacked)
        options = plan.shardings(arrays, stacked, self._mesh) | self.compiler_options
        self.jitted = jitted = jax.jit(step, donate_argnums=0, **options)
        self.jitted = self._add_precompiled(jitted, arrays, plan)
        return values

    def _trace_first(self, values: list[PyTree], call: RunCall) -> list[PyTree]:
        name, signature = self._signature.function.name, self._signature
        labels = call_description.names_of_leaves(call.fn, call.args, call.kwargs)
        drift.check(call.leaves(), labels, f"Strategy.run of '{name}'")
        self.inputs = Inputs.of(signature.kinds, call.leaves(), call.binding, signature.groups)
        self._find_trace(jax.tree.leaves(values))
        captured = self._values_of_captured()
        if self._storage is not None:
            captured = self._storage.fetch(captured)
            self._storage.take_in(call.binding)
        leaves, structure = jax.tree.flatten(captured + values)
        self._place_state(leaves, call)
        return jax.tree.unflatten(structure, leaves)

    def _add_precompiled(
        self, jitted: jax.stages.Wrapped, arrays: list[Any], plan: StepPlan
    ) -> jax.stages.Wrapped | executables.Precompiled:
        """Returns `jitted` with the saved programs; without any, tries the first compile."""
        function = self._signature.function
        both = plan.take_donated(arrays), plan.take_kept(arrays)
        if function.loaded:
            lowered, with_programs = jitted.trace(*both).lower(), jitted
            for saved in function.loaded:
                if compiled := saved.executable_for(lowered):
                    with_programs = executables.Precompiled(compiled, with_programs)
            return with_programs
        if not self.is_lowering:
            program = self._find_trace(arrays[len(self.traces.captured) :]).program.closed
            first_compile.try_program(program, self._mesh, jitted, both, function.name)
        return jitted

    def _positions_of_donated(self, call: RunCall, first: int) -> list[int]:
        """Returns the positions among `values` of the donated arguments, which begin at `first`."""
        argnums, function = self._signature.options.donate_argnums, self._signature.function
        argument_checks.check_positions(argnums, "donate_argnums", function.name, len(call.args))
        if not argnums:
            return []
        sizes = [len(function.flattener.elements((x,), {}, i)[0]) for i, x in enumerate(call.args)]
        ends = np.cumsum([0, *sizes])
        elements = {e for i in argnums for e in range(ends[i], ends[i + 1])}
        return [first + k for k, e in enumerate(call.kinds.dynamic) if e in elements]

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options for XLA, as keyword arguments of `jit`; the later ones win."""
        options = dict(self._strategy.compiler_options)
        options.update(self._signature.function.findings.compiler_options)
        options.update(self._signature.options.experimental_xla_options or ())
        return {"compiler_options": options} if options else {}

    @property
    def donates_state(self) -> bool:
        """Whether XLA may overwrite the arrays of old state."""
        # Not if the storage shares memory with fetched values: the only copy would be lost.
        shares = self._storage is not None and self._storage.shares_memory
        return self._signature.options.donate_state and not shares

    # What `jit` calls when its cache misses.

    def _current_call(self) -> RunCall:
        assert self.call is not None, "traces happen in calls only"
        if isinstance(self.call, tuple):
            self.call = RunCall(*self.call, rows=(), is_checked=False)
        return self.call

    def _is_for(self, call: RunCall) -> bool:
        """Whether all arguments of a call are nested and placed as this step needs them."""
        if call.is_checked:
            return True
        signature = self._signature
        leaves, structure = signature.function.flattener.leaves(call.args, call.kwargs)
        if structure != signature.structure:
            return False
        if call.binding is not None and not call.binding.has_same_values():
            return False
        numbers = signature.kinds.numbers
        if call_arguments.Kinds.of(leaves, numbers) != signature.kinds:
            return False
        if not all(call_arguments.is_number_or_array(leaves[i]) for i in numbers):
            return False
        # `_place` returns an array unchanged if it is in place. `jit` was compiled for such arrays;
        # one that would move has another sharding.
        values = self.values(call)
        return _have_same_arrays(self._place(values), values)

    def body(self, values: list[Any]) -> tuple[list[Any], Outcome]:
        """Returns new state and results for flat inputs: `jit` traces it once per signature.

        Raises:
            PlanOutdated: If the trace uses state that the plan does not have.
        """
        traces = self.traces
        traced = self._find_trace(values[len(traces.captured) :])
        num_inputs = len(traces.captured) + len(self.inputs.stacked)
        # `Step.attempt` then creates a new plan. That ends, because the collected state only grows.
        if not traces.covers(traced) or len(values) != num_inputs:
            raise PlanOutdated
        traces.agree(traced, self._current_call(), is_lowering=self.is_lowering)
        plan = self.plan
        assert plan is not None

        def place_results(results, returned):
            places = plan.places[len(traces.captured) :]
            return returned_state.keep_places(results, returned, places)

        # Aggregations at the end of the step use the cross-device ops of the strategy in charge.
        with context.enter(context.Mode(context.ContextKind.SCOPE, self._strategy)):
            return traced.emit(self._mesh, traces.captured, values, plan.state, place_results)

    def find_trace(self, call: RunCall) -> TracedStep:
        """Returns the trace for the inputs of `call`; traces if there is none."""
        return self._find_trace(self.call_inputs(call))

    def _find_trace(self, call_inputs: Sequence[Any]) -> TracedStep:
        return self.traces.find(call_inputs, self._current_call(), self.inputs)


def _have_same_arrays(values: list[PyTree], others: list[PyTree]) -> bool:
    """Whether two lists of values contain the same array objects."""
    return all(map(operator.is_, jax.tree.leaves(values), jax.tree.leaves(others)))
