"""A second trace of a function, with more rows on more replicas, to compare with the first one.

`trace_warnings` compares them to find how values grow with rows and replicas. It is not run.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tpudist.lowering import compile
from tpudist.programs.degrees import degree
from tpudist.programs.jaxprs import ClosedJaxpr
from tpudist.run.frame.trace_requests import MakesVariables, TraceAgain
from tpudist.run.frame.traced_rows import TracedRows
from tpudist.run.outputs.results import CallOutputs
from tpudist.run.replica_body import ReplicaBody
from tpudist.run.replica_call import ReplicaCall
from tpudist.xla import trace_caches


def trace_larger(
    call: ReplicaCall,
    variables: Sequence[Any],
    shapes: Sequence[jax.ShapeDtypeStruct],
    stacked: Sequence[bool],
    dims: Mapping[int, int],
) -> ClosedJaxpr | None:
    """Returns the program of one replica with more rows, among more replicas.

    None if the function cannot be traced for these numbers.

    Args:
        variables: The Variables and captured PerReplicas that are the first inputs.
        shapes: Shapes of the inputs; `[num_replicas, ...]` if `stacked`.
        stacked: For each input, whether it has one part per replica.
        dims: The inputs that are batches, with the dim of their rows.
    """
    strategy: Any = call.strategy
    mesh = strategy.replica_mesh.with_more_replicas(degree.REPLICAS_FACTOR)
    twin = strategy._with_mesh(mesh)
    twin._twin_of = strategy._twin_of or strategy
    twin.storage = None  # a trace moves nothing
    larger = []
    for i, (x, is_stacked) in enumerate(zip(shapes, stacked, strict=True)):
        shape = [*x.shape]
        if is_stacked:
            shape[0] = mesh.num_replicas
        if i in dims:
            shape[1 + dims[i]] *= degree.ROWS_FACTOR
        larger.append(jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type))
    found = CallOutputs()
    body = ReplicaBody(dataclasses.replace(call, strategy=twin), variables)
    groups, rows = call.inputs.groups, None
    if groups is not None:
        rows = TracedRows([degree.ROWS_FACTOR * x for x in groups.sizes])
    function = body.make_flat_function(found, rows)
    try:
        # JAX must not use inner functions of this trace in others: they have the axis of more
        # replicas in them.
        with trace_caches.separate(), twin._use_mesh():
            program = compile.trace(function, mesh, larger, stacked, call.name)
    except (Exception, TraceAgain, MakesVariables):
        # Whatever the function raises for other numbers of rows or replicas. Of the other requests,
        # `LocalState` comes after a trace, and `OtherStrategy` only under the default strategy,
        # which has one replica.
        return None
    return None if found.incomplete else program.closed
