"""Which results of a replica function hold the batch's examples, and so its padding."""

from collections.abc import Sequence
from typing import Any

import jax

from tpudist.run.replica_body import ReplicaBody
from tpudist.run.results import CallOutputs, TracedStep
from tpudist.xla import compile, replica_equality


def find_rows(
    body: ReplicaBody,
    traced: TracedStep,
    shapes: Sequence[jax.ShapeDtypeStruct],
    stacked: Sequence[bool],
) -> tuple[dict[int, tuple[int, int]], frozenset[int]]:
    """For each result that holds the examples of a group of arguments, the group and the dim.

    A result of as many rows may be something else (as many classes, say). So the function is traced
    once more, with one row more (in each microbatch): the examples are what grew.

    Also the groups whose rows must be as many on all replicas, since their values are gathered
    along another dim.

    Args:
        body: The function.
        traced: Its trace.
        shapes: Of the flat inputs of that.
        stacked: Which of them hold one part per replica.
    """
    inputs, mesh = body.call.inputs, traced.mesh
    groups = inputs.groups
    if groups is None:
        return {}, frozenset()
    outputs: list[Any] = list(traced.program.closed.out_avals[: traced.found.num_results])
    n = mesh.num_replicas
    # An equal result may hold the rows of all replicas: what `all_gather` gave.
    parts = [1 if s or n == 1 else n for s in traced.stack_outputs[: len(outputs)]]
    candidates = [
        (i, group, dim)
        for i, x in enumerate(outputs)
        for dim, size in enumerate(x.shape)
        if (group := groups.only_one_of(size // parts[i])) is not None and not size % parts[i]
    ]
    gathers = replica_equality.find_gathers(traced.program.closed.jaxpr)
    if not candidates and not gathers:
        return {}, frozenset()
    more = traced.found.row_multiple
    offset = len(body.variables) + inputs.num_nnx
    grown = list(shapes)
    for k, group in enumerate(inputs.group_of_argument):
        if group is not None:
            x, dim = grown[offset + k], 1 + groups.dims[group]
            shape = (*x.shape[:dim], x.shape[dim] + more, *x.shape[dim + 1 :])
            grown[offset + k] = jax.ShapeDtypeStruct(shape, x.dtype)
    try:
        closed = compile.trace(
            body.make_flat_function(CallOutputs(), more), mesh, grown, stacked
        ).closed
    except Exception:
        # The function has its batch size written into it: as many rows then are its rows.
        found = [(i, g, d) for i, g, d in candidates if parts[i] == 1 and d == groups.dims[g]]
        return {i: (group, dim) for i, group, dim in reversed(found)}, frozenset()
    again: list[Any] = list(closed.out_avals)
    found = [
        (i, group, dim)
        for i, group, dim in candidates
        if again[i].ndim > dim and again[i].shape[dim] == outputs[i].shape[dim] + more * parts[i]
    ]
    even = [
        groups.only_one_of(before)
        for (shape, along), (larger, _) in zip(
            gathers, replica_equality.find_gathers(closed.jaxpr), strict=False
        )
        for dim, (before, after) in enumerate(zip(shape, larger, strict=False))
        if dim != along and after == before + more
    ]
    rows = {i: (group, dim) for i, group, dim in reversed(found)}  # the first dim, if several
    return rows, frozenset(group for group in even if group is not None)
