"""`strategy.run` inside a program that is being traced: in `tpudist.function`, and in `merge_call`.

The replica function is traced by itself, with all that it can reach as inputs, so that the proof
says of each result whether replicas agree on it, as it does for a call of its own. Then its program
becomes a part of the one around it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.context.frame import Frame
from tpudist.lowering import compile
from tpudist.options import RunOptions
from tpudist.programs import axis_names, jaxprs, replica_equality, unchanged_keys
from tpudist.run.arguments import call_arguments, call_description
from tpudist.run.arguments.inputs import Inputs
from tpudist.run.outputs import outputs
from tpudist.run.outputs.results import CallOutputs, aggregate_outputs
from tpudist.run.replica_body import ReplicaBody
from tpudist.run.replica_call import ReplicaCall
from tpudist.run.trace import (
    causes_of_variables,
    find_not_summed,
    find_statistics,
    outputs_of_random_keys,
    place_collections,
)
from tpudist.run.trace_frame import ReplicaFrame
from tpudist.run.variable_references import check_references
from tpudist.state import nnx_binding, nnx_contents
from tpudist.values.per_replica import LocalPart, PerReplica
from tpudist.xla import compile_log, integers


def run(
    frame: Frame,
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    options: RunOptions | None = None,
) -> Any:
    """Calls `fn` on every replica, as a part of the trace of `frame`; see `Strategy.run`."""
    assert isinstance(frame, ReplicaFrame), frame
    strategy = frame.strategy
    name = compile_log.name_of(fn)
    leaves, structure = call_arguments.Flattener().leaves(args, kwargs)
    for x in leaves:
        if isinstance(x, integers.HOST_TYPES):
            integers.check_fit(x, f"An argument of '{name}'")
    leaves = [_capture_part(frame, x) for x in leaves]
    kinds = call_arguments.Kinds.of(leaves)
    binding = nnx_binding.Binding([leaves[i] for i in kinds.objects]) if kinds.objects else None
    inputs = Inputs.of(kinds, leaves, binding, None)
    call = ReplicaCall(
        strategy=strategy,
        name=name,
        fn=fn,
        structure=structure,
        num_args=len(args),
        leaves=leaves,
        kinds=kinds,
        binding=binding,
        inputs=inputs,
        outer=frame,
        rules=options.aggregation if options is not None else (),
    )
    variables = list(frame.values)
    values = [
        *map(frame.value_of, variables),
        *(jax.tree.leaves(binding.values()) if binding is not None else ()),
        *_arrays(kinds, leaves),
    ]
    call, found, closed = _trace(call, variables, values)
    if found.interruption is not None:
        _begin_variables(frame, found, compile.evaluate(closed, values))
        raise found.interruption
    causes = causes_of_variables(variables)
    causes += ["an argument" if s else None for s in inputs.stacked]
    keys = outputs_of_random_keys(binding, found, len(variables))
    closed, _ = unchanged_keys.keep_unchanged_keys(closed, keys)
    proof = replica_equality.prove(closed, causes, [frame.cause_of(x) for x in closed.consts])
    check_references(proof, found.references, name)
    own = proof.causes[: len(proof.causes) - len(found.computed)]
    proof = dataclasses.replace(proof, causes=own)
    stack, aggregated = outputs.place_outputs(
        proof,
        found.variables,
        found.nnx,
        inputs.parts_of_objects,
        binding,
        name,
        strategy.num_replicas_in_sync,
        rules=dict(call.rules),
        is_nested=True,
        not_sums=call.not_sums,
    )

    def labels() -> list[str]:
        return call_description.names_of_leaves(fn, args, kwargs)

    num = len(variables)
    returned = place_collections(call, found, closed, proof, num, labels, (stack, aggregated))
    frame.read |= found.read
    results = compile.evaluate(closed, values)
    if frame.rows is not None:
        statistics = find_statistics(call, found, closed, returned, num, labels, aggregated)
        old = {output: values[source] for output, source in statistics.items()}
        results = frame.rows.keep_state(results, old)
    results = aggregate_outputs(results, aggregated)
    if found.computed:
        _begin_variables(frame, found, results[-len(found.computed) :])
        results = results[: -len(found.computed)]
    rest = results[found.num_results :]
    for variable, value in zip(found.variables, rest, strict=False):
        frame.set(variable, value)
    new: list[Any] = [*rest[len(found.variables) :]]
    is_local = stack[len(stack) - len(new) :]
    for k, at in enumerate(found.nnx):
        if is_local[k] and at not in inputs.parts_of_objects:
            new[k] = LocalPart(new[k])
            frame.note_part(new[k])
    _write_objects(binding, found, new)
    return _build_result(frame, found, results, stack, leaves, binding)


def _trace(
    call: ReplicaCall, variables: Sequence[Any], values: Sequence[Any]
) -> tuple[ReplicaCall, CallOutputs, jaxprs.ClosedJaxpr]:
    """Traces the function: again if it does something else than add to sums over examples."""
    found = CallOutputs()
    flat = ReplicaBody(call, variables).make_flat_function(found)
    traced = jax.make_jaxpr(flat)(*values)
    closed = axis_names.use_replica_axis(call.strategy.replica_mesh, traced)
    if found.interruption is None:
        if not_sums := find_not_summed(call, found, closed, len(variables)):
            not_sums |= call.not_sums
            return _trace(dataclasses.replace(call, not_sums=not_sums), variables, values)
    return call, found, closed


def _begin_variables(frame: ReplicaFrame, found: CallOutputs, values: Sequence[jax.Array]) -> None:
    """The Variables that the function has made are made by the trace around it."""
    for variable, value in zip(found.computed, values, strict=True):
        frame.begin_variable(variable, value, computed=True)


def _capture_part(frame: ReplicaFrame, x: Any) -> Any:
    captured = isinstance(x, PerReplica) and not isinstance(x, LocalPart)
    return LocalPart(frame.capture(x)) if captured else x


def _arrays(kinds: call_arguments.Kinds, leaves: Sequence[Any]) -> list[Any]:
    """The arrays among the arguments, in the order of `Inputs`."""
    arrays = []
    for i in kinds.dynamic:
        arrays += [x.array if isinstance(x, PerReplica) else x for x in jax.tree.leaves(leaves[i])]
    return arrays


def _write_objects(binding, found: CallOutputs, values: Sequence[Any]) -> None:
    if binding is None or not found.nnx:
        return
    changed = list(dict.fromkeys(i for i, _ in found.nnx))
    held = jax.tree.structure([binding.values()[i] for i in changed])
    nnx_binding.write([binding.variables[i] for i in changed], held.unflatten(values))


def _build_result(frame, found: CallOutputs, outputs, stack, leaves, binding) -> Any:
    merged = []
    for kind, what in found.result:
        if kind == "array":
            x = outputs[what]
            if stack[what]:
                x = LocalPart(x)
                frame.note_part(x)
            merged.append(x if stack[what] else _keep_equal(frame, x))
        elif kind == "argument":
            merged.append(leaves[what])
        elif kind == "object":
            merged.append(nnx_contents.nodes_of(binding.objects())[what])
        elif frame.has_partial_batch and isinstance(what, int | float):
            merged.append(_keep_equal(frame, jnp.asarray(what)))
        else:
            merged.append(what)
    return found.treedef.unflatten(merged)


def _keep_equal(frame: ReplicaFrame, x: Any) -> Any:
    """A result that looks equal on all replicas, as it is; one part each where it depends on rows.

    Of a partial batch replicas have other numbers of rows. That a value depends on them is found by
    the proof of the whole program, and the function is traced once more.
    """
    kept = x if frame.rows is None else frame.rows.keep_equal(x)
    if kept is None:
        kept = LocalPart(x)
        frame.note_part(kept)
    else:
        frame.note_equal_result(kept)
    return kept
