"""One trace of a replica function: its inputs and outputs, and which outputs are equal.

The trace sees the function as one replica does. The proof then places every output: equal on all
replicas, one part per replica, aggregated by its rule, or rejected.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tpudist.lowering import compile
from tpudist.programs import replica_agreement, replica_equality
from tpudist.programs.jax_errors import axis_errors, value_errors
from tpudist.programs.rows import row_kernels
from tpudist.run import larger_trace, program_checks, trace_warnings
from tpudist.run.arguments import argument_checks, pmap_arrays
from tpudist.run.frame.trace_requests import LocalState, TraceAgain
from tpudist.run.frame.traced_rows import TracedRows
from tpudist.run.frame.variable_references import check_references
from tpudist.run.outputs import divergence, loss_numbers, output_placement
from tpudist.run.outputs.results import CallOutputs, TracedStep
from tpudist.run.outputs.state_outputs import StateOutputs
from tpudist.run.partial_batch import PartialBatch
from tpudist.run.replica_body import ReplicaBody
from tpudist.run.replica_call import ReplicaCall
from tpudist.state.variable import Variable
from tpudist.xla import trace_caches
from tpudist.xla.compiler import garbage, phases
from tpudist.xla.compiler.phases import Phase


@dataclasses.dataclass(frozen=True)
class _TraceInputs:
    """The flat inputs of a trace.

    Attributes:
        variables: The Variables, captured PerReplicas and guests that are the first inputs.
        shapes: Shapes of all inputs, `[num_replicas, ...]` if stacked. The last ones are the
            numbers of real rows.
        stacked: For each input, whether it has one part per replica.
        num_without_rows: Number of inputs without the numbers of real rows.
        find_names: Returns the names of the flat arguments.
    """

    variables: list[Any]
    shapes: list[jax.ShapeDtypeStruct]
    stacked: list[bool]
    num_without_rows: int
    find_names: Callable[[], list[str]]

    @classmethod
    def of(
        cls, call: ReplicaCall, call_inputs: Sequence[Any], find_names: Callable[[], list[str]]
    ) -> "_TraceInputs":
        assert call.findings is not None, "nested traces are made in `nested_run`"
        # All Variables of the strategy are inputs, since any of them may be read. The program is
        # fed only the Variables that are read or written: see `TracedStep.positions`.
        variables = [*call.strategy._list_variables(), *call.findings.captures]
        values = map(call.strategy._value_of, variables)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
        shapes += map(compile.shape_of, call_inputs)
        stacked = [v.on_read for v in variables] + list(call.inputs.stacked)
        return cls(variables, shapes, stacked, len(shapes) - call.inputs.num_groups, find_names)

    def names(self, call: ReplicaCall) -> list[str]:
        """Returns the user's names of the inputs, without the numbers of rows."""
        leaves = self.find_names()
        names = [v.name for v in self.variables]
        if call.binding is not None:
            objects = [leaves[i] for i in call.kinds.objects]
            for path, value in zip(call.binding.paths, call.binding.values(), strict=True):
                name = ".".join([objects[path[0]], *map(str, path[1:])])
                names += [name] * len(jax.tree.leaves(value))
        return [*names, *(leaves[i] for i in call.inputs.leaves_of_arguments)]


# The order in this function matters. Requests for other inputs come first, because the function is
# traced again then. Then checks raise for programs that cannot work. Then the proof places the
# outputs, and only then come warnings, which need the placement, and cost a second trace.
@garbage.collect_rarely()
@phases.measure(Phase.PROOFS)
def trace_step(
    call: ReplicaCall, call_inputs: Sequence[Any], find_names: Callable[[], list[str]]
) -> TracedStep:
    """Traces the function of `call`, and proves which of its outputs are equal on every replica.

    `call_inputs` are the flat inputs after the Variables, for their shapes; `find_names` returns
    the names of the flat arguments.

    Raises:
        ValueError: If state that must be equal on every replica would differ, a large array or NNX
            object is captured, or replicas could disagree on whether to communicate.
    """
    mesh, name = call.strategy.replica_mesh, call.name
    argument_checks.check_leaves(call.leaves, call.kinds, call.binding, mesh.num_replicas, name)
    pmap_arrays.refuse_replicated(call.leaves, find_names, name)
    inputs = _TraceInputs.of(call, call_inputs, find_names)
    num_variables = len(inputs.variables)
    body = ReplicaBody(call, inputs.variables)
    found = CallOutputs()
    rows = TracedRows(call.inputs.groups.sizes) if call.inputs.groups is not None else None
    flat = body.make_flat_function(found, rows)
    end = inputs.num_without_rows
    shapes, stacked = inputs.shapes[:end], inputs.stacked[:end]
    # The traces for fewer rows are compared with it, and share no inner functions either.
    caches = contextlib.nullcontext() if rows is None else trace_caches.separate()
    with contextlib.ExitStack() as stack:
        stack.enter_context(caches)
        kernels = stack.enter_context(row_kernels.note_calls())
        if not call.kinds.numbers:  # else `TraceFailed.of` reads JAX's names, and traces again
            stack.enter_context(value_errors.name_inputs(lambda: inputs.names(call)))
        program = compile.trace(flat, mesh, shapes, stacked, name)
    # Requests and checks.
    _raise_requests(call, inputs, found, program)
    state = StateOutputs(call, found, program.closed, num_variables, find_names)
    if not_sums := state.find_not_summed():
        # An average is a sum over replicas if the function only adds to it. Otherwise every replica
        # begins with all of it. The recursion ends, because `not_sums` only grows.
        not_sums |= call.not_sums
        return trace_step(dataclasses.replace(call, not_sums=not_sums), call_inputs, find_names)
    # The proof.
    causes = causes_of_variables(inputs.variables) + _causes_of_arguments(call, find_names())
    partial, full_program, full_found = None, program, found
    if rows is None:
        proof = replica_equality.prove(program.closed, causes)
    else:
        traced = None if kernels else (found, program.closed)
        with phases.measure(Phase.ROWS):
            partial = PartialBatch(body, mesh, inputs.shapes, inputs.stacked, causes, rows, traced)
        found, program, proof = partial.outputs, partial.program, partial.proof
    # Again: a partial batch has a program and outputs of its own.
    state = StateOutputs(call, found, program.closed, num_variables, find_names)
    state, program, proof = _keep_unchanged_keys(state, program, proof)
    check_references(proof, found.references, name)
    if mesh.num_replicas > 1:
        program_checks.check_hazards(proof, name)
    # The placement.
    placement = output_placement.place_outputs(call, found, proof)
    returned = state.place_collections(proof, placement)
    replaced = state.find_replaced(returned)
    if partial is not None:
        averaged = state.find_averaged_state(returned, placement.aggregated)
        averages = [
            {o: replaced[o] for o in pair} for _, *pair in loss_numbers.find_averages(call, found)
        ]
        with phases.measure(Phase.ROWS):
            program = partial.keep_state(program, averaged, averages)
    position = {v: i for i, v in enumerate(inputs.variables)}
    replaced |= {found.num_results + i: position[v] for i, v in enumerate(found.variables)}
    traced = TracedStep(
        program=program,
        found=found,
        all_variables=inputs.shapes[:num_variables],
        positions={v: position[v] for v in found.read | set(found.variables)},
        stack_outputs=placement.stacked,
        aggregated=placement.aggregated,
        mesh=mesh,
        partial=partial,
        returned={i: k for i, k in returned.items() if not placement.stacked[i]},
        replaced=replaced,
        drifting=state.find_drifting(program, proof, returned, placement.stacked),
    )
    # Warnings.
    _add_warnings(traced, call, inputs, full_program, full_found, proof, partial)
    return traced


def _raise_requests(
    call: ReplicaCall, inputs: _TraceInputs, found: CallOutputs, program: compile.ReplicaProgram
) -> None:
    """Raises if the function must be traced again with more inputs, or cannot work at all."""
    if found.incomplete:
        raise TraceAgain(_make_initializer(call, inputs, found, program))
    program_checks.check_constants(program, call.name, call.whole)
    axis_errors.check_constraints(call.strategy.replica_mesh, program.closed, call.name)
    if found.structure_change:
        raise ValueError(divergence.describe_structure_change(call.name, found.structure_change))
    if local := found.local - call.inputs.parts_of_objects:
        raise LocalState(local)


def _keep_unchanged_keys(
    state: StateOutputs, program: compile.ReplicaProgram, proof: replica_agreement.Agreement
) -> tuple[StateOutputs, compile.ReplicaProgram, replica_agreement.Agreement]:
    """Replaces the outputs that are unchanged random keys by their inputs, which are equal."""
    closed, kept = state.keep_unchanged_keys()
    if not kept:
        return state, program, proof
    causes = [None if i in kept else cause for i, cause in enumerate(proof.causes)]
    return (
        dataclasses.replace(state, closed=closed),
        dataclasses.replace(program, closed=closed),
        dataclasses.replace(proof, causes=tuple(causes)),
    )


def _add_warnings(
    traced: TracedStep,
    call: ReplicaCall,
    inputs: _TraceInputs,
    full_program: compile.ReplicaProgram,
    full_found: CallOutputs,
    proof: replica_agreement.Agreement,
    partial: PartialBatch | None,
) -> None:
    """Adds faults, warnings and shares of losses to a trace.

    Args:
        full_program: Program for full batches, without masks.
        full_found: Its outputs.
    """
    strategy, variables = call.strategy, inputs.variables
    num_replicas = traced.mesh.num_replicas
    trace_larger = functools.partial(
        larger_trace.trace_larger,
        call,
        variables,
        inputs.shapes[: inputs.num_without_rows],
        inputs.stacked[: inputs.num_without_rows],
    )
    degrees = None
    averages = loss_numbers.find_averages(call, full_found)
    if (
        strategy._stand_in is None
        and num_replicas > 1
        and (proof.sums or partial is not None or averages)
    ):
        degrees = trace_warnings.find_degrees(
            call, variables, full_program, traced.replaced, trace_larger
        )
    faults = () if degrees is None else degrees.faults
    fault = trace_warnings.choose_fault(call, variables, full_program, faults)
    if partial is not None:
        partial.takes_means = degrees is None or degrees.takes_means
    warnings = trace_warnings.find_warnings(
        call, variables, full_program, proof, inputs.find_names, fault
    )
    if degrees is not None and not call.whole:
        count = full_found.num_results
        warnings += loss_numbers.find_warnings(call, full_program, degrees.outputs, count, averages)
        traced.shares = loss_numbers.find_shares(full_program, degrees.outputs, count, num_replicas)
    traced.faults = tuple(x for x in faults if x is fault or x.is_draw)
    traced.warnings = warnings


def _causes_of_arguments(call: ReplicaCall, names: Sequence[str]) -> list[str | None]:
    """Returns for the inputs after the Variables why they differ between replicas, or None."""
    inputs = call.inputs
    causes: list[str | None] = [
        "an NNX object that holds one value for each replica" if differs else None
        for differs in inputs.stacked[: inputs.num_nnx]
    ]
    # After the arguments, `stacked` has the numbers of rows.
    arguments = zip(inputs.leaves_of_arguments, inputs.stacked[inputs.num_nnx :], strict=False)
    causes += [f"argument '{names[leaf]}'" if differs else None for leaf, differs in arguments]
    return causes + ["the number of real rows"] * inputs.num_groups


def causes_of_variables(variables: Sequence[Any]) -> list[str | None]:
    """Returns why the values of Variables and captures differ between replicas, or None."""
    return [
        None
        if not v.on_read
        else f"the components of ON_READ variable '{v.name}'"
        if isinstance(v, Variable)
        else f"'{v.name}', which the function captures"
        for v in variables
    ]


def _make_initializer(
    call: ReplicaCall, inputs: _TraceInputs, found: CallOutputs, program: compile.ReplicaProgram
) -> Callable[[Callable[[], list[jax.Array]]], None]:
    """Returns a function that initializes the Variables which a trace has created."""
    # Their initial values are the last outputs of the program, which is run for them. All replicas
    # begin with the value of the first one.

    def initialize(call_inputs: Callable[[], list[jax.Array]]) -> None:
        if not found.computed:
            return
        strategy = call.strategy
        values = [*map(strategy._value_of, inputs.variables), *call_inputs()]
        count = len(found.computed)
        outputs = compile.last_outputs(program, strategy.replica_mesh, count, values)
        if outputs is None:
            raise ValueError(
                f"'{call.name}' makes Variable '{found.computed[0].name}' from its arguments, "
                "which are abstract here. Run the function once before, or use a constant initial "
                "value."
            )
        for variable, value in zip(found.computed, outputs, strict=True):
            variable.initialize(value)

    return initialize
