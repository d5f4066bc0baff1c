"""Traces of a function for several numbers of rows of its batches, for `partial_batch`.

Numbers of rows are a *point*: the rows of each batch, then of each part of a split batch, then of
gathers of all replicas. All traces run the same Python code in the same order, so splits, gathers
and outputs of one trace are found in another by their position.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tpudist.lowering import compile
from tpudist.programs import axis_names
from tpudist.programs.degrees import degree
from tpudist.programs.jaxprs import ClosedJaxpr
from tpudist.programs.rows.errors import RowsError
from tpudist.programs.rows.row_sizes import Point, RowSize
from tpudist.run.frame.traced_rows import TracedRows
from tpudist.run.outputs.results import CallOutputs
from tpudist.run.replica_body import ReplicaBody
from tpudist.xla import trace_caches
from tpudist.xla.mesh import ReplicaMesh


@dataclasses.dataclass(frozen=True)
class Knowledge:
    """Facts about a function from one round of traces, which the next round uses.

    Attributes:
        gathered: Pairs of the number of a gather of the rows of all replicas, and the index of its
            size in `sizes_gathered`.
        sizes_gathered: Sizes of one replica whose sum over replicas is gathered.
        differing: Numbers of the values that look equal on all replicas, but depend on the rows.
    """

    gathered: tuple[tuple[int, int], ...] = ()
    sizes_gathered: tuple[RowSize, ...] = ()
    differing: frozenset[int] = frozenset()


class RowTraces:
    """One round of traces.

    Args:
        shapes: Shapes of the flat inputs, without the numbers of rows.
        stacked: For each of them, whether it has one part per replica.
        num_splits: Number of times that the function splits a batch into parts.
        first: A trace that exists already: its point, outputs and program.

    Attributes:
        outputs: The outputs of each trace, by its point.
    """

    def __init__(
        self,
        body: ReplicaBody,
        mesh: ReplicaMesh,
        shapes: Sequence[jax.ShapeDtypeStruct],
        stacked: Sequence[bool],
        num_splits: int,
        knowledge: Knowledge,
        first: tuple[Point, CallOutputs, ClosedJaxpr] | None = None,
    ):
        self._body, self._mesh = body, mesh
        self._shapes, self._stacked = shapes, stacked
        self._num_groups = body.call.inputs.num_groups
        self._num_splits, self._knowledge = num_splits, knowledge
        self.outputs: dict[Point, CallOutputs] = {}
        self._first = {} if first is None else {first[0]: first[1:]}

    def trace(self, point: Point) -> ClosedJaxpr:
        """Returns the program at a point, and keeps its outputs.

        Raises:
            RowsError: If its outputs differ from those of the first trace.
        """
        outputs, program = self._first.pop(point, None) or self._trace(point)
        if not _are_alike(next(iter(self.outputs.values()), outputs), outputs):
            raise RowsError("it returns a different structure, or assigns different Variables")
        self.outputs[point] = outputs
        return program

    def trace_more_replicas(self, point: Point) -> tuple[CallOutputs, ClosedJaxpr]:
        """Returns the outputs and the program at a point, among more replicas."""
        return self._trace(point, degree.REPLICAS_FACTOR)

    def _trace(self, point: Point, replicas_factor: int = 1) -> tuple[CallOutputs, ClosedJaxpr]:
        """Traces the function at a point; with `replicas_factor` times as many replicas."""
        first_gather = self._num_groups + self._num_splits
        gathered = {index: point[first_gather + size] for index, size in self._knowledge.gathered}
        rows = TracedRows(
            point[: self._num_groups],
            point[self._num_groups : first_gather],
            gathered,
            self._knowledge.differing,
        )
        outputs = CallOutputs()
        first = next(iter(self.outputs.values()), outputs)
        changed = {leaf for leaf, _ in first.nnx}
        # JAX's trace of an inner function has the numbers of rows of one trace in it, so traces
        # cannot share them.
        with trace_caches.separate():
            program = compile.trace(
                axis_names.call_on_longer_axis(
                    self._mesh,
                    replicas_factor,
                    self._body.make_flat_function(outputs, rows, changed),
                ),
                self._mesh,
                self._resize(point),
                self._stacked,
                self._body.call.name,
            )
        if len(rows.parts) != self._num_splits:
            raise RowsError("it splits its batches into parts a different number of times")
        return outputs, program.closed

    def _resize(self, point: Point) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the inputs at a point."""
        shapes = list(self._shapes)
        for i, dim, group in _dims_of_rows(self._body):
            x, at = shapes[i], 1 + dim  # dim 0 counts replicas
            shape = (*x.shape[:at], point[group], *x.shape[at + 1 :])
            shapes[i] = jax.ShapeDtypeStruct(shape, x.dtype)
        return shapes


def pad(body: ReplicaBody, values: Sequence[jax.Array], sizes: Sequence[int]) -> list[jax.Array]:
    """Returns local inputs padded to `sizes`, the number of rows of each group of batches."""
    # The padding repeats the first row: a real value, with which no operation fails.
    padded = list(values)
    for i, dim, group in _dims_of_rows(body):
        x = padded[i]
        if missing := sizes[group] - x.shape[dim]:
            row = jax.lax.slice_in_dim(x, 0, 1, axis=dim)
            padded[i] = jnp.concatenate([x, *[row] * missing], dim)
    return padded


def _dims_of_rows(body: ReplicaBody) -> list[tuple[int, int, int]]:
    """Returns the dims of inputs that are rows: the input, the dim of its part, and the group."""
    inputs = body.call.inputs
    first = len(body.variables) + inputs.num_nnx
    return [
        (i, dim, group)
        for i, rows in enumerate(inputs.rows_of_arguments, first)
        for dim, group in rows
    ]


def _are_alike(first: CallOutputs, outputs: CallOutputs) -> bool:
    return (
        [kind for kind, _ in first.result] == [kind for kind, _ in outputs.result]
        and first.treedef == outputs.treedef
        and first.variables == outputs.variables
        and first.nnx == outputs.nnx
        and not outputs.structure_change
    )
