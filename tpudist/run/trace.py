"""One trace of a replica function: what it reads, writes and returns, and what is equal.

The trace sees the function as one replica does. Afterwards every output is placed by the proof:
equal everywhere, one per replica, aggregated by its own rule, or refused.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tpudist.lowering import compile
from tpudist.options import ALL_COLLECTIONS
from tpudist.programs import (
    accumulation,
    axis_errors,
    jaxprs,
    replica_agreement,
    replica_equality,
    unchanged_keys,
)
from tpudist.reduce_op import ReduceOp, VariableAggregation
from tpudist.run import larger_trace, program_checks, remarks
from tpudist.run.arguments import call_arguments, pmap_arrays
from tpudist.run.arguments.inputs import positions
from tpudist.run.captures import LocalState, NewVariable
from tpudist.run.outputs import (
    drift_finder,
    loss_numbers,
    outputs,
    returned_state,
    state_collections,
)
from tpudist.run.outputs.results import CallOutputs, TracedStep
from tpudist.run.partial_batch import PartialBatch
from tpudist.run.replica_body import ReplicaBody
from tpudist.run.replica_call import ReplicaCall
from tpudist.run.traced_rows import TracedRows
from tpudist.run.variable_references import check_references
from tpudist.state import nnx_binding
from tpudist.state.variable import Variable
from tpudist.values.drift import Drift


def trace_step(
    call: ReplicaCall, rest: Sequence[Any], labels: Callable[[], list[str]]
) -> TracedStep:
    """Traces the function of `call`, and proves which of its outputs are equal on every replica.

    Args:
        call: The call.
        rest: The flat inputs after the Variables, for their shapes.
        labels: Gives the names of the flat arguments.

    Raises:
        ValueError: State that must be equal on every replica would differ, a large array or NNX
            object is captured, or replicas could disagree on whether to communicate.
    """
    strategy, name, inputs = call.strategy, call.name, call.inputs
    assert call.findings is not None, "nested traces are made in `nested_run`"
    mesh = strategy.replica_mesh
    call_arguments.check_leaves(call.leaves, call.kinds, call.binding, mesh.num_replicas, name)
    pmap_arrays.refuse_replicated(call.leaves, labels, name)
    variables = [*strategy._list_variables(), *call.findings.captures]
    values = map(strategy._value_of, variables)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
    shapes += map(compile.shape_of, rest)
    stacked = [v.on_read for v in variables] + list(inputs.stacked)
    body = ReplicaBody(call, variables)
    found = CallOutputs()
    end = len(shapes) - inputs.num_groups
    rows = TracedRows(inputs.groups.sizes) if inputs.groups is not None else None
    program = compile.trace(
        body.make_flat_function(found, rows), mesh, shapes[:end], stacked[:end], name
    )
    if found.incomplete:
        raise NewVariable(_make_starter(found, program, strategy, variables, name))
    program_checks.check_constants(program, name, call.whole)
    axis_errors.check_constraints(mesh, program.closed, name)
    if found.structure_change:
        raise ValueError(outputs.describe_structure_change(name, found.structure_change))
    if local := found.local - inputs.parts_of_objects:
        raise LocalState(local)
    if not_sums := find_not_summed(call, found, program.closed, len(variables)):
        not_sums |= call.not_sums
        return trace_step(dataclasses.replace(call, not_sums=not_sums), rest, labels)
    causes = causes_of_variables(variables) + _causes_of_arguments(call, labels())
    partial, plain, plain_found = None, program, found
    if rows is None:
        proof = replica_equality.prove(program.closed, causes)
    else:
        partial = PartialBatch(body, mesh, shapes, stacked, causes, rows)
        found, program, proof = partial.found, partial.program, partial.proof
    program, proof = _keep_unchanged_keys(call, found, program, proof, len(variables))
    check_references(proof, found.references, name)
    if mesh.num_replicas > 1:
        program_checks.check_hazards(proof, name)
    stack_outputs, aggregated = outputs.place_outputs(
        proof,
        found.variables,
        found.nnx,
        inputs.parts_of_objects,
        call.binding,
        name,
        mesh.num_replicas,
        call.whole,
        dict(call.rules),
        not_sums=call.not_sums,
    )
    returned = place_collections(
        call, found, program.closed, proof, len(variables), labels, (stack_outputs, aggregated)
    )
    position = {v: i for i, v in enumerate(variables)}

    larger = functools.partial(
        larger_trace.trace_larger, call, variables, shapes[:end], stacked[:end]
    )
    state = _find_replaced(call, found, returned, len(variables))
    if partial is not None:
        statistics = find_statistics(
            call, found, program.closed, returned, len(variables), labels, aggregated
        )
        pairs = [pair for _, *pair in loss_numbers.find_averages(call, found)]
        program = partial.keep_state(program, statistics, [{o: state[o] for o in x} for x in pairs])
    state |= {found.num_results + i: position[v] for i, v in enumerate(found.variables)}
    degrees = None
    averages = loss_numbers.find_averages(call, plain_found)
    if (
        strategy._stand_in is None
        and mesh.num_replicas > 1
        and (proof.sums or partial is not None or averages)
    ):
        degrees = remarks.find_degrees(call, variables, plain, state, larger)
    faults = () if degrees is None else degrees.faults
    fault = remarks.choose_fault(call, variables, plain, faults)
    if partial is not None:
        partial.takes_means = degrees is None or degrees.takes_means
    shown: tuple[remarks.Remark, ...] = ()
    shares: Mapping[int, str] = {}
    if degrees is not None and not call.whole:
        end = plain_found.num_results
        shown = loss_numbers.find_remarks(call, plain, degrees.outputs, end, averages)
        shares = loss_numbers.find_shares(plain, degrees.outputs, end, mesh.num_replicas)
    return TracedStep(
        program=program,
        found=found,
        all_variables=shapes[: len(variables)],
        positions={v: position[v] for v in found.read | set(found.variables)},
        stack_outputs=stack_outputs,
        aggregated=aggregated,
        mesh=mesh,
        partial=partial,
        returned={i: k for i, k in returned.items() if not stack_outputs[i]},
        drifting=_find_drifting(
            call, found, program, proof, returned, len(variables), labels, stack_outputs
        ),
        faults=tuple(x for x in faults if x is fault or x.is_draw),
        remarks=(*remarks.find_remarks(call, variables, plain, proof, labels, fault), *shown),
        shares=shares,
    )


def _find_replaced(
    call: ReplicaCall, found: CallOutputs, returned: Mapping[int, int], num_variables: int
) -> dict[int, int]:
    """Returns the outputs that are new state beside Variables, with the inputs that they replace.

    Args:
        call: The call.
        found: What it gave.
        returned: See `place_collections`.
        num_variables: Number of inputs that are Variables, the first ones.
    """
    state = {o: num_variables + k for o, k in returned.items()}
    if call.binding is not None:
        flat, first = positions(call.binding.values()), found.num_results + len(found.variables)
        state |= {first + n: num_variables + flat[i][j] for n, (i, j) in enumerate(found.nnx)}
    return state


def find_statistics(
    call: ReplicaCall,
    found: CallOutputs,
    closed: jaxprs.ClosedJaxpr,
    returned: Mapping[int, int],
    num_variables: int,
    labels: Callable[[], list[str]],
    aggregated: Mapping[ReduceOp | None, Sequence[int]],
) -> dict[int, int]:
    """Returns the new state whose mean is taken, with the inputs that it replaces.

    A replica without rows keeps it as it was.
    """
    state = _find_replaced(call, found, returned, num_variables)
    state |= _find_collections(call, found, closed, num_variables, labels)
    statistics = set(aggregated.get(ReduceOp.MEAN, ()))
    return {o: i for o, i in state.items() if o in statistics}


def find_not_summed(
    call: ReplicaCall, found: CallOutputs, closed: jaxprs.ClosedJaxpr, num_variables: int
) -> frozenset[int]:
    """Returns the leaves of NNX's averages to which the function does something else than add."""
    binding = call.binding
    if binding is None or not binding.summed or call.whole:
        return frozenset()
    flat, first = positions(binding.values()), found.num_results + len(found.variables)
    rules, parts = dict(call.rules), call.inputs.parts_of_objects
    return frozenset(
        i
        for n, (i, j) in enumerate(found.nnx)
        if binding.is_average(i)
        and i not in call.not_sums
        and (i, j) not in parts
        and binding.aggregation(i, rules) is VariableAggregation.SUM
        and accumulation.replaces_state(closed, first + n, num_variables + flat[i][j])
    )


def _find_collections(
    call: ReplicaCall,
    found: CallOutputs,
    closed: jaxprs.ClosedJaxpr,
    num_variables: int,
    labels: Callable[[], list[str]],
) -> dict[int, int]:
    """Returns the results that are parts of collections, with the inputs that they replace."""
    paths = state_collections.paths_of(found.treedef)
    results = {
        what: paths[i]
        for i, (kind, what) in enumerate(found.result)
        if kind == "array" and i in paths
    }
    names, first = labels(), num_variables + call.inputs.num_nnx
    arguments = {i: names[leaf] for i, leaf in enumerate(call.inputs.leaves_of_arguments, first)}
    replaced = state_collections.find_replaced(results, arguments, dict(call.rules))
    forms = [(x.shape, x.dtype) for x in closed.in_avals]
    outputs = [(x.shape, x.dtype) for x in closed.out_avals]
    return {o: i for o, i in replaced.items() if outputs[o] == forms[i]}


def _find_drifting(
    call: ReplicaCall,
    found: CallOutputs,
    program: compile.ReplicaProgram,
    proof: replica_agreement.Agreement,
    returned: Mapping[int, int],
    num_variables: int,
    labels: Callable[[], list[str]],
    stacked: Sequence[bool],
) -> dict[int, Drift]:
    """Returns the outputs that replace equal state and differ; see `drift_finder`."""
    replaced = {i: num_variables + k for i, k in returned.items() if stacked[i]}
    rules = dict(call.rules)
    if not replaced or call.whole or ALL_COLLECTIONS in rules:
        return {}
    names, leaves = labels(), call.inputs.leaves_of_arguments
    known = {
        num_variables + k: names[leaves[k - call.inputs.num_nnx]]
        for k in returned.values()
        if k >= call.inputs.num_nnx
    }
    found_drift = drift_finder.find_drifting(
        program.closed, replaced, stacked, proof.causes, known, call.name, program.stacked
    )
    return {
        i: x
        for i, x in found_drift.items()
        if rules.get(state_collections.collection_of(x.leaf, rules) or "") != "none"
    }


def place_collections(
    call: ReplicaCall,
    found: CallOutputs,
    closed: jaxprs.ClosedJaxpr,
    proof: replica_agreement.Agreement,
    num_variables: int,
    labels: Callable[[], list[str]],
    placed: tuple[list[bool], dict[ReduceOp | None, list[int]]],
) -> dict[int, int]:
    """Decides what becomes of state in plain pytrees that is given back; changes `placed`.

    Returns:
        The outputs that are such state, each with the number of its input after the Variables.

    Raises:
        ValueError: Parameters or optimizer state would differ between replicas.
    """
    returned, certain = returned_state.find_returned_outputs(
        found, call.structure, call.inputs, closed, num_variables
    )
    keeps_each = ALL_COLLECTIONS in dict(call.rules)
    if call.strategy.num_replicas_in_sync > 1 and not call.whole and not keeps_each:
        leaves, rules = call.inputs.leaves_of_arguments, dict(call.rules)
        outputs_of = {i: what for i, (kind, what) in enumerate(found.result) if kind == "array"}
        others = [i for i, what in outputs_of.items() if placed[0][what] and what not in returned]
        by_path = state_collections.find_collections(found.treedef, others, rules)
        known = {outputs_of[i]: label for i, label in by_path.items()}
        if returned:
            names = labels()
            known |= {i: names[leaves[k - call.inputs.num_nnx]] for i, k in returned.items()}
        if rules:
            kinds = call.binding.types if call.binding is not None else ()
            given = [
                *labels(),
                *(kind.__name__ for kind in kinds),
                *state_collections.paths_of(found.treedef).values(),
            ]
            if text := state_collections.describe_unknown(rules, given, call.name):
                remarks.warn_once([remarks.Remark(UserWarning, text)], set())
        dtypes = [x.dtype for x in closed.out_avals]
        state_collections.place_collections(proof, known, certain, dtypes, rules, call.name, placed)
    return returned


def _keep_unchanged_keys(
    call: ReplicaCall,
    found: CallOutputs,
    program: compile.ReplicaProgram,
    proof: replica_agreement.Agreement,
    num_variables: int,
) -> tuple[compile.ReplicaProgram, replica_agreement.Agreement]:
    """The program and its proof, where random streams of NNX keep keys that nothing has changed."""
    keys = outputs_of_random_keys(call.binding, found, num_variables)
    closed, kept = unchanged_keys.keep_unchanged_keys(program.closed, keys)
    if not kept:
        return program, proof
    causes = [None if i in kept else cause for i, cause in enumerate(proof.causes)]
    proof = dataclasses.replace(proof, causes=tuple(causes))
    return dataclasses.replace(program, closed=closed), proof


def outputs_of_random_keys(
    binding: nnx_binding.Binding | None, found: CallOutputs, num_variables: int
) -> dict[int, int]:
    """The outputs that are new keys of random streams of NNX, each with the input it replaces."""
    if binding is None:
        return {}
    flat = positions(binding.values())
    first = found.num_results + len(found.variables)
    return {
        first + n: num_variables + flat[i][j]
        for n, (i, j) in enumerate(found.nnx)
        if binding.is_random_key(i)
    }


def _causes_of_arguments(call: ReplicaCall, labels: Sequence[str]) -> list[str | None]:
    """Why the inputs after the Variables differ between replicas, in words, or None."""
    inputs = call.inputs
    causes: list[str | None] = [
        "an NNX object that holds one value for each replica" if differs else None
        for differs in inputs.stacked[: inputs.num_nnx]
    ]
    arguments = zip(inputs.leaves_of_arguments, inputs.stacked[inputs.num_nnx :], strict=False)
    causes += [f"argument '{labels[leaf]}'" if differs else None for leaf, differs in arguments]
    num_groups = len(inputs.groups.sizes) if inputs.groups else 0
    return causes + ["the number of real rows"] * num_groups


def causes_of_variables(variables: Sequence[Any]) -> list[str | None]:
    """Why the values of Variables and captured PerReplicas differ between replicas, or None."""
    return [
        None
        if not v.on_read
        else f"the components of ON_READ variable '{v.name}'"
        if isinstance(v, Variable)
        else f"'{v.name}', which the function captures"
        for v in variables
    ]


def _make_starter(
    found: CallOutputs, program, strategy, variables, name: str
) -> Callable[..., None]:
    """Gives the Variables that a trace has made the initial values that it computes.

    Those are the last outputs of its program, which is run for them; all replicas begin with the
    first one's.
    """

    def start(inputs: Callable[[], list[Any]]) -> None:
        if not found.computed:
            return
        values = [*map(strategy._value_of, variables), *inputs()]
        count = len(found.computed)
        outputs = compile.last_outputs(program, strategy.replica_mesh, count, values)
        if outputs is None:
            raise ValueError(
                f"'{name}' makes Variable '{found.computed[0].name}' from its arguments, which are "
                "abstract here. Run the function once before, or use a constant initial value."
            )
        for variable, value in zip(found.computed, outputs, strict=True):
            variable.initialize(value)

    return start
