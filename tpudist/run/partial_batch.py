"""The program of a replica function for partial batches, whose padding the function never sees.

Full batches run the plain program. All partial batches share one more program, which is created
when the first of them arrives. The function is traced for several numbers of rows, which shows what
in it depends on them (`programs.rows`), and evaluated so that only real rows count. For each number
of rows that occurs, a trace confirms that the program computes the function. An operation that
cannot be followed raises an error.
"""

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from tpudist.lowering import compile
from tpudist.programs import axis_names, replica_agreement, replica_equality
from tpudist.programs.degrees import degree
from tpudist.programs.jaxprs import ClosedJaxpr
from tpudist.programs.rows import psum_numbers
from tpudist.programs.rows.errors import RowsError
from tpudist.programs.rows.row_program import MIN_TRACED_ROWS, RowProgram
from tpudist.programs.rows.row_sizes import Dim, Point, RowSize, is_rows, size_at
from tpudist.reduce_op import ReduceOp
from tpudist.run import row_dependent_numbers
from tpudist.run.arguments.inputs import Inputs
from tpudist.run.frame.traced_rows import TracedRows
from tpudist.run.outputs.results import CallOutputs, LeafKind, ResultLeaf
from tpudist.run.replica_body import ReplicaBody, share_of_replica
from tpudist.run.row_dependent_numbers import are_equal
from tpudist.xla import collectives, trace_caches
from tpudist.xla.mesh import ReplicaMesh

_log = logging.getLogger("tpudist")


@dataclasses.dataclass(frozen=True)
class _Knowledge:
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


class PartialBatch:
    """A replica function for partial batches.

    Numbers of rows are a *point*: the rows of each batch, then of each part of a split batch, then
    of gathers of all replicas. Sizes in the program are functions of these *symbols*.

    Args:
        shapes: Shapes of the flat inputs; the last ones are the numbers of rows.
        stacked: For each input, whether it has one part per replica.
        causes: For each input, why it differs between replicas, or None.
        first: Rows of the trace for full batches.

    Attributes:
        program: Program of one replica, with the numbers of real rows as the last inputs.
        found: The outputs of the call, for any number of rows.
        takes_means: Whether the function may take means over a replica's own rows.

    Raises:
        ValueError: If the function cannot be followed.
    """

    def __init__(
        self,
        body: ReplicaBody,
        mesh: ReplicaMesh,
        shapes: Sequence[jax.ShapeDtypeStruct],
        stacked: Sequence[bool],
        causes: Sequence[str | None],
        first: TracedRows,
    ):
        self._body, self._mesh = body, mesh
        self._inputs: Inputs = body.call.inputs
        assert self._inputs.groups is not None, "some batch is partial"
        self._groups = self._inputs.groups
        end = len(shapes) - self.num_groups
        self._shapes, self._stacked = list(shapes[:end]), list(stacked[:end])
        self._all_shapes, self._all_stacked = shapes, stacked
        self._parts = [(number, rows) for number, rows, _ in first.parts]
        self._knowledge, self._warned = _Knowledge(), False
        self.takes_means = True
        try:
            # A fixpoint: a round may find that the function gathers rows of all replicas, or that
            # values which look equal are not. The next round knows that. It ends because knowledge
            # only grows, and a program has finitely many gathers and values; if a round finds
            # something and learns nothing new, the function cannot be followed.
            while True:
                self._found: dict[Point, CallOutputs] = {}
                self._program = RowProgram(self._trace, self._full_sizes())
                self._numbers = row_dependent_numbers.find_numbers(
                    self._found, self._program.points
                )
                self.found = self._describe_outputs()
                self.program = compile.trace(self._evaluate, mesh, shapes, stacked, body.call.name)
                self.proof = self._mark_rows(replica_equality.prove(self.program.closed, causes))
                unsettled = self._program.requirements.gathered or self._find_broken_claims()
                if not unsettled:
                    self._line_of_sum = self._find_sum_of_numbers()
                    return
                knowledge = self._extend_knowledge()
                if knowledge == self._knowledge:
                    raise RowsError(
                        "a function that jax.jit traced earlier gathers the rows of all replicas, "
                        "or calls strategy.run: call it without jax.jit"
                    )
                self._knowledge = knowledge
        except RowsError as error:
            raise self._make_error(error) from error

    def _full_sizes(self) -> Point:
        """Returns the point of full batches; parts of a split batch are rounded up."""
        # Sizes that are gathered are evaluated at the padded numbers of rows, at which the program
        # is traced: a formula may not hold below `MIN_TRACED_ROWS`.
        sizes = self._groups.sizes
        full = (*sizes, *(-(-rows // number) for number, rows in self._parts))
        padded = tuple(max(rows, MIN_TRACED_ROWS) for rows in full)
        n = self._mesh.num_replicas
        return (*full, *(n * size.at(padded) for size in self._knowledge.sizes_gathered))

    def _extend_knowledge(self) -> _Knowledge:
        """Returns the knowledge for the next round of traces; the same if nothing is new."""
        before = self._knowledge
        sizes = list(before.sizes_gathered)
        gathered = dict(before.gathered)
        for index, size in self._program.requirements.gathered.items():
            own = self._symbols_of_replica(size)
            if own not in sizes:
                sizes.append(own)
            gathered[index] = sizes.index(own)
        differing = before.differing | self._find_broken_claims()
        return _Knowledge(tuple(gathered.items()), tuple(sizes), differing)

    def keep_state(
        self,
        program: compile.ReplicaProgram,
        state: Mapping[int, int],
        averages: Sequence[Mapping[int, int]],
    ) -> compile.ReplicaProgram:
        """Returns the program extended so that replicas without rows do not change some state.

        Args:
            program: `self.program`, or a program that was made from it.
            state: Outputs that are new state, with the inputs they replace. State does not change
                if some batch has no rows.
            averages: For each average, its total and its count in the same form. They do not change
                if no batch has rows and a number is not finite: the mean over no rows.
        """
        if not state and not averages:
            return program

        def keep(*local: jax.Array) -> list[jax.Array]:
            outputs = list(compile.evaluate(program.closed, local))
            rows = jnp.stack(local[-self.num_groups :])
            for i, source in state.items():
                outputs[i] = jnp.where(rows.min() == 0, local[source], outputs[i])
            for average in averages:
                own = {i: share_of_replica(local[source]) for i, source in average.items()}
                is_lost = [~jnp.isfinite(outputs[i]) & jnp.isfinite(own[i]) for i in average]
                is_lost = (rows.max() == 0) & jnp.stack(is_lost).any()
                for i in average:
                    outputs[i] = jnp.where(is_lost, own[i], outputs[i])
            return outputs

        name = self._body.call.name
        return compile.trace(keep, self._mesh, self._all_shapes, self._all_stacked, name)

    def _find_broken_claims(self) -> frozenset[int]:
        return frozenset((*self._program.requirements.broken_claims, *self.proof.broken_claims))

    def _symbols_of_replica(self, size: RowSize) -> RowSize:
        """Returns a size in the symbols of one replica, which are the first ones."""
        # The symbols of gathers come last. They depend on all replicas.
        own = self.num_groups + len(self._parts)
        if any(i >= own for i in size.symbols):
            raise RowsError("a value that was gathered from all replicas is gathered again")
        return size.with_symbols(own)

    def _mark_rows(self, proof: replica_agreement.Agreement) -> replica_agreement.Agreement:
        """Returns the proof in which outputs with rows differ: replicas may have other numbers."""
        own = self.num_groups + len(self._parts)
        causes = list(proof.causes)
        for i, dims in self.rows_of_results().items():
            if any(k < own for _, size in dims for k in size.symbols):
                causes[i] = causes[i] or "the number of real rows"
        return dataclasses.replace(proof, causes=tuple(causes))

    @property
    def num_groups(self) -> int:
        """Number of batches, each with its number of real rows."""
        return len(self._groups.sizes)

    def _evaluate(self, *local: jax.Array) -> list[jax.Array]:
        """Returns the flat outputs for the flat local inputs, whose last ones are real rows."""
        values, counts = local[: -self.num_groups], local[-self.num_groups :]
        unknown = [None] * len(self._parts)
        zeros = [0] * len(self._parts)
        own = [size.at([*counts, *zeros]) for size in self._knowledge.sizes_gathered]
        totals = collectives.all_reduce(ReduceOp.SUM, own) if own else []
        known = [*counts, *unknown, *totals]
        outputs = self._program.evaluate(known, self._pad(values))
        numbers = [jnp.asarray(x.at(known)) for x in self._numbers.values()]
        end = self.found.num_results - len(numbers)
        return [*outputs[:end], *numbers, *outputs[end:]]

    @property
    def dims_of_outputs(self) -> list[tuple[Dim, ...]]:
        """The dims of each flat output."""
        dims = list(self._program.out_dims)
        end = self.found.num_results - len(self._numbers)
        return [*dims[:end], *[()] * len(self._numbers), *dims[end:]]

    def rows_of_results(self) -> dict[int, tuple[tuple[int, RowSize], ...]]:
        """Returns the dims that are rows of each result that has some, with their sizes."""
        rows = {}
        for i, dims in enumerate(self.dims_of_outputs):
            own = tuple((d, dim) for d, dim in enumerate(dims) if isinstance(dim, RowSize))
            if own and i < self.found.num_results:
                rows[i] = own
        return rows

    def warn_of_empty(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Warns once that means over rows are NaN on replicas that have none."""
        empty = [i for i, own in enumerate(zip(*rows, strict=True)) if 0 in own]
        if empty and self.takes_means and not self._warned:
            self._warned = True
            _log.warning(
                "'%s' received a partial batch: replica(s) %s have no rows, and a mean over no "
                "rows is NaN. Use tpudist.compute_average_loss(per_example_loss), and sum it over "
                "the replicas. Or skip such batches: InputOptions(partial_batch='drop').",
                self._body.call.name,
                ", ".join(map(str, empty)),
            )

    def check(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Raises for numbers of rows for which the program does not compute the function.

        Raises:
            ValueError: If the function computes something else for these numbers, or cannot be
                followed.
        """
        try:
            points = [
                point
                for replica in range(self._mesh.num_replicas)
                for point in self._points_of(rows, replica)
            ]
            self._program.check(points)
            if self._line_of_sum is not None and any(len(set(each)) > 1 for each in rows):
                raise RowsError(
                    "jax.lax.psum of a Python number, such as x.shape[0], multiplies it by the "
                    "number of replicas, but here replicas have different numbers of rows. Sum an "
                    "array: jax.lax.psum(jnp.asarray(x.shape[0]), axis)",
                    self._line_of_sum,
                )
            first = self._found[self._program.points[0]]
            for point in dict.fromkeys(points):
                row_dependent_numbers.confirm_numbers(self._found, first, self._numbers, point)
        except RowsError as error:
            raise self._make_error(error, rows) from error

    def extents(
        self, result: int, rows: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Returns the dims of a result that are rows, each with the real rows of each replica."""
        replicas = range(self._mesh.num_replicas)
        return [
            (dim, tuple(size_at(size, self._points_of(rows, i)[0]) for i in replicas))
            for dim, size in self.rows_of_results().get(result, ())
        ]

    def _points_of(self, rows: Sequence[tuple[int, ...]], replica: int) -> list[Point]:
        """Returns the points of a replica: its rows, with each number that parts may have."""
        sizes, counts = self._groups.sizes, [each[replica] for each in rows]
        rows_of_parts = []
        for number, whole in self._parts:
            # The split batch is only known by its size: it may be any batch of that size. n rows in
            # k parts make parts of n / k rows, rounded down or up.
            reals = {n for n, size in zip(counts, sizes, strict=True) if size == whole} or {whole}
            rows_of_parts.append(sorted({r for n in reals for r in (n // number, -(-n // number))}))
        points = [(*counts, *parts) for parts in itertools.product(*rows_of_parts)]
        totals = tuple(
            sum(self._size_on(size, rows, i) for i in range(self._mesh.num_replicas))
            for size in self._knowledge.sizes_gathered
        )
        return [(*point, *totals) for point in points]

    def _size_on(self, size: RowSize, rows: Sequence[tuple[int, ...]], replica: int) -> int:
        return size.at([*(each[replica] for each in rows), *[0] * len(self._parts)])

    def _trace(self, point: Point) -> ClosedJaxpr:
        found, program = self._trace_at(point)
        if not _are_alike(next(iter(self._found.values()), found), found):
            raise RowsError("it returns a different structure, or assigns different Variables")
        self._found[point] = found
        return program

    def _trace_at(self, point: Point, factor: int = 1) -> tuple[CallOutputs, ClosedJaxpr]:
        """Traces the function at a point; the axis of replicas is `factor` times as long."""
        own = self.num_groups + len(self._parts)
        gathered = {index: point[own + size] for index, size in self._knowledge.gathered}
        rows = TracedRows(
            point[: self.num_groups],
            point[self.num_groups : own],
            gathered,
            self._knowledge.differing,
        )
        found = CallOutputs()
        first = next(iter(self._found.values()), found)
        changed = {leaf for leaf, _ in first.nnx}
        shapes = self._resize(point)
        # JAX's trace of an inner function has the numbers of rows of one trace in it, so traces
        # cannot share them.
        with trace_caches.separate():
            program = compile.trace(
                axis_names.call_on_longer_axis(
                    self._mesh, factor, self._body.make_flat_function(found, rows, changed)
                ),
                self._mesh,
                shapes,
                self._stacked,
                self._body.call.name,
            )
        if len(rows.parts) != len(self._parts):
            raise RowsError("it splits its batches into parts a different number of times")
        return found, program.closed

    def _find_sum_of_numbers(self) -> str | None:
        """Returns the line that uses a number of rows times the number of replicas, or None."""
        # JAX's `psum` of a Python number multiplies it by the number of replicas in the trace, so
        # no equation shows it. A trace with a longer axis has another number there. It costs one
        # trace.
        point = self._program.points[0]
        try:
            found, program = self._trace_at(point, degree.REPLICAS_FACTOR)
        except Exception:  # whatever the function raises for another number of replicas
            return None
        first = self._found[point].result
        for i, (kind, value) in enumerate(found.result):
            if i in self._numbers and kind is LeafKind.VALUE and not are_equal(value, first[i][1]):
                return ""
        return psum_numbers.find_line(self._program.labelled, program)

    def _resize(self, point: Point) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the inputs at a point."""
        shapes = list(self._shapes)
        offset = len(self._body.variables) + self._inputs.num_nnx
        for k, rows in enumerate(self._inputs.rows_of_arguments):
            for dim, group in rows:
                x, at = shapes[offset + k], 1 + dim
                shape = (*x.shape[:at], point[group], *x.shape[at + 1 :])
                shapes[offset + k] = jax.ShapeDtypeStruct(shape, x.dtype)
        return shapes

    def _pad(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns inputs with as many rows as the program has: at least `MIN_TRACED_ROWS`."""
        # The padding repeats the first row: a real value, with which no operation fails.
        padded = list(values)
        offset = len(self._body.variables) + self._inputs.num_nnx
        for k, rows in enumerate(self._inputs.rows_of_arguments):
            for dim, group in rows:
                x = padded[offset + k]
                missing = self._program.full[group] - x.shape[dim]
                if missing:
                    padded[offset + k] = jnp.concatenate(
                        [x, *[jax.lax.slice_in_dim(x, 0, 1, axis=dim)] * missing], dim
                    )
        return padded

    def _describe_outputs(self) -> CallOutputs:
        base = self._found[self._program.points[0]]
        result = list(base.result)
        for k, i in enumerate(self._numbers):
            result[i] = ResultLeaf(LeafKind.ARRAY, base.num_results + k)
        for dims in self._program.out_dims[base.num_results :]:
            if any(map(is_rows, dims)):
                raise RowsError("it assigns state with as many elements as a replica has rows")
        return dataclasses.replace(
            base,
            result=result,
            num_results=base.num_results + len(self._numbers),
            has_known_containers=False,
        )

    def _make_error(
        self, error: RowsError, rows: Sequence[tuple[int, ...]] | None = None
    ) -> ValueError:
        have = f" ({'; '.join(map(str, rows))} rows on the replicas)" if rows else ""
        where = f" At {error.line}." if error.line else ""
        return ValueError(
            f"'{self._body.call.name}' received a partial batch{have}, and tpudist cannot follow "
            f"its rows: {error.reason}.{where} Padding rows could change the result there, so the "
            "step is not run. Drop partial batches (InputOptions(partial_batch='drop')), or write "
            "the operation in another way. If the rows of each batch are a multiple of "
            f"{self._mesh.num_replicas}, the number of replicas, partial_batch='shrink' gives all "
            "replicas equal parts without padding."
        )


def _are_alike(first: CallOutputs, found: CallOutputs) -> bool:
    return (
        [kind for kind, _ in first.result] == [kind for kind, _ in found.result]
        and first.treedef == found.treedef
        and first.variables == found.variables
        and first.nnx == found.nnx
        and not found.structure_change
    )
