"""`strategy.run` inside a program that is being traced: in `tpudist.function`, and in `merge_call`.

The replica function is traced by itself, with all that it can reach as inputs, so that the proof
says for each result whether replicas agree on it, as in a call outside. Then its program becomes a
part of the one around it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.array_types import PyTree
from tpudist.context.frame import Frame
from tpudist.lowering import compile
from tpudist.options import RunOptions
from tpudist.programs import axis_names, replica_agreement, replica_equality
from tpudist.run.arguments import call_arguments, call_description
from tpudist.run.arguments.flattener import Flattener
from tpudist.run.arguments.inputs import Inputs
from tpudist.run.frame.trace_frame import ReplicaFrame
from tpudist.run.frame.variable_references import check_references
from tpudist.run.outputs import output_placement
from tpudist.run.outputs.output_placement import OutputPlacement
from tpudist.run.outputs.results import CallOutputs, LeafKind, aggregate_outputs
from tpudist.run.outputs.state_outputs import StateOutputs
from tpudist.run.replica_body import ReplicaBody
from tpudist.run.replica_call import ReplicaCall
from tpudist.run.trace import causes_of_variables
from tpudist.state import nnx_binding, nnx_contents
from tpudist.values.per_replica import LocalPart, PerReplica
from tpudist.xla import descriptions, integers


def run(
    frame: Frame,
    fn: Callable[..., PyTree],
    args: tuple,
    kwargs: dict[str, Any],
    options: RunOptions | None = None,
) -> PyTree:
    """Calls `fn` on every replica, as a part of the trace of `frame`; see `Strategy.run`."""
    assert isinstance(frame, ReplicaFrame), frame
    call = _make_call(frame, fn, args, kwargs, options)
    variables = list(frame.values)
    values = [
        *map(frame.value_of, variables),
        *(jax.tree.leaves(call.binding.values()) if call.binding is not None else ()),
        *_arrays_of(call),
    ]

    def labels() -> list[str]:
        return call_description.names_of_leaves(fn, args, kwargs)

    state = _trace(call, variables, values, labels)
    call, found = state.call, state.found
    if found.interruption is not None:
        _begin_variables(frame, found, compile.evaluate(state.closed, values))
        raise found.interruption
    closed, _ = state.keep_unchanged_keys()
    state = dataclasses.replace(state, closed=closed)
    proof = _prove(frame, state, variables)
    placement = output_placement.place_outputs(call, found, proof)
    returned = state.place_collections(proof, placement)
    frame.read |= found.read
    outputs = compile.evaluate(closed, values)
    if frame.rows is not None:
        averages = state.find_averaged_state(returned, placement.aggregated)
        old = {output: values[source] for output, source in averages.items()}
        outputs = frame.rows.keep_on_empty_replicas(outputs, old)
    outputs = aggregate_outputs(outputs, placement.aggregated)
    if found.computed:
        _begin_variables(frame, found, outputs[-len(found.computed) :])
        outputs = outputs[: -len(found.computed)]
    _write_state(frame, call, found, outputs, placement)
    return _build_result(frame, call, found, outputs, placement)


def _make_call(
    frame: ReplicaFrame,
    fn: Callable[..., PyTree],
    args: tuple,
    kwargs: dict[str, Any],
    options: RunOptions | None,
) -> ReplicaCall:
    name = descriptions.name_of(fn)
    leaves, structure = Flattener().leaves(args, kwargs)
    for x in leaves:
        if isinstance(x, integers.HOST_TYPES):
            integers.check_fit(x, f"An argument of '{name}'")
    leaves = [_open_captured(frame, x) for x in leaves]
    kinds = call_arguments.Kinds.of(leaves)
    binding = nnx_binding.Binding([leaves[i] for i in kinds.objects]) if kinds.objects else None
    # Of the options, only the rules apply here. Donation and XLA's options are those of the program
    # around, and all numbers are static.
    return ReplicaCall(
        strategy=frame.strategy,
        name=name,
        fn=fn,
        structure=structure,
        num_args=len(args),
        leaves=leaves,
        kinds=kinds,
        binding=binding,
        inputs=Inputs.of(kinds, leaves, binding, None),
        outer=frame,
        rules=options.aggregation if options is not None else (),
    )


def _open_captured(frame: ReplicaFrame, x: Any) -> Any:
    """Returns this replica's part if an argument is a PerReplica from outside of the trace."""
    is_captured = isinstance(x, PerReplica) and not isinstance(x, LocalPart)
    return LocalPart(frame.capture(x)) if is_captured else x


def _arrays_of(call: ReplicaCall) -> list[Any]:
    """Returns the arrays among the arguments, in the order of `Inputs`."""
    arrays = []
    for i in call.kinds.dynamic:
        leaves = jax.tree.leaves(call.leaves[i])
        arrays += [x.array if isinstance(x, PerReplica) else x for x in leaves]
    return arrays


def _trace(
    call: ReplicaCall,
    variables: Sequence[Any],
    values: Sequence[Any],
    labels: Callable[[], list[str]],
) -> StateOutputs:
    """Traces the function; again if it does more than add to sums over examples."""
    # As in `trace.trace_step`, the recursion ends, because `not_sums` only grows.
    found = CallOutputs()
    flat = ReplicaBody(call, variables).make_flat_function(found)
    traced = jax.make_jaxpr(flat)(*values)
    closed = axis_names.use_replica_axis(call.strategy.replica_mesh, traced)
    state = StateOutputs(call, found, closed, len(variables), labels)
    if found.interruption is None:
        if not_sums := state.find_not_summed():
            not_sums |= call.not_sums
            return _trace(dataclasses.replace(call, not_sums=not_sums), variables, values, labels)
    return state


def _prove(
    frame: ReplicaFrame, state: StateOutputs, variables: Sequence[Any]
) -> replica_agreement.Agreement:
    """Proves which results are equal on all replicas; without initial values of new Variables."""
    call, found, closed = state.call, state.found, state.closed
    causes = causes_of_variables(variables)
    causes += ["an argument" if s else None for s in call.inputs.stacked]
    proof = replica_equality.prove(closed, causes, [frame.cause_of(x) for x in closed.consts])
    check_references(proof, found.references, call.name)
    end = len(proof.causes) - len(found.computed)
    return dataclasses.replace(proof, causes=proof.causes[:end])


def _begin_variables(frame: ReplicaFrame, found: CallOutputs, values: Sequence[jax.Array]) -> None:
    """Gives the Variables that the function has created to the trace around this one."""
    for variable, value in zip(found.computed, values, strict=True):
        frame.begin_variable(variable, value, computed=True)


def _write_state(
    frame: ReplicaFrame,
    call: ReplicaCall,
    found: CallOutputs,
    outputs: Sequence[jax.Array],
    placement: OutputPlacement,
) -> None:
    """Assigns new values of Variables and NNX objects in the trace around this one."""
    # The state follows the results: values of Variables, then NNX arrays.
    first, end = found.num_results, found.num_results + len(found.variables)
    for variable, value in zip(found.variables, outputs[first:end], strict=True):
        frame.set(variable, value)
    new: list[Any] = [*outputs[end:]]
    is_local = placement.stacked[end:]
    for k, leaf_and_array in enumerate(found.nnx):
        if is_local[k] and leaf_and_array not in call.inputs.parts_of_objects:
            new[k] = LocalPart(new[k])
            frame.note_part(new[k])
    binding = call.binding
    if binding is None or not found.nnx:
        return
    changed = list(dict.fromkeys(i for i, _ in found.nnx))
    structure = jax.tree.structure([binding.values()[i] for i in changed])
    nnx_binding.write([binding.variables[i] for i in changed], structure.unflatten(new))


def _build_result(
    frame: ReplicaFrame,
    call: ReplicaCall,
    found: CallOutputs,
    outputs: Sequence[jax.Array],
    placement: OutputPlacement,
) -> PyTree:
    merged = []
    for kind, item in found.result:
        if kind is LeafKind.ARRAY:
            x = outputs[item]
            if placement.stacked[item]:
                x = LocalPart(x)
                frame.note_part(x)
                merged.append(x)
            else:
                merged.append(_keep_equal(frame, x))
        elif kind is LeafKind.ARGUMENT:
            merged.append(call.leaves[item])
        elif kind is LeafKind.OBJECT:
            assert call.binding is not None, "it has the object"
            merged.append(nnx_contents.nodes_of(call.binding.objects())[item])
        elif frame.has_partial_batch and isinstance(item, int | float):
            merged.append(_keep_equal(frame, jnp.asarray(item)))
        else:
            merged.append(item)
    return found.treedef.unflatten(merged)


def _keep_equal(frame: ReplicaFrame, x: jax.Array) -> jax.Array | LocalPart:
    """Returns a result that looks equal on all replicas; one part each if it depends on rows."""
    # In a partial batch replicas have different numbers of rows. The proof of the whole program
    # finds out that a value depends on them, and the function is traced once more.
    kept = x if frame.rows is None else frame.rows.keep_equal(x)
    if kept is None:
        part = LocalPart(x)
        frame.note_part(part)
        return part
    frame.note_equal_result(kept)
    return kept
