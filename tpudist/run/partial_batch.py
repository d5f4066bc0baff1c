"""The program of a replica function for partial batches: its padding is invisible to the function.

Full batches run the plain program. All partial ones share one more, which is made when the first of
them comes: the function is traced for several numbers of rows, which tells what in it depends on
them (`programs.rows`), and evaluated so that only real rows count. For each number of rows that
occurs it is confirmed that the function is what this program computes; what cannot be followed is
refused.
"""

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.lowering import compile
from tpudist.programs import axis_names, replica_agreement, replica_equality
from tpudist.programs.degrees import degree
from tpudist.programs.rows import psum_numbers
from tpudist.programs.rows.errors import RowsError
from tpudist.programs.rows.row_program import MIN_TRACED_ROWS, RowProgram
from tpudist.programs.rows.row_sizes import (
    Dim,
    Piece,
    Piecewise,
    Point,
    RowNumber,
    RowSize,
    fit_number,
    fit_size,
    is_rows,
    size_at,
)
from tpudist.reduce_op import ReduceOp
from tpudist.run.arguments.inputs import Inputs
from tpudist.run.outputs.results import CallOutputs
from tpudist.run.replica_body import ReplicaBody, share_of_replica
from tpudist.run.traced_rows import TracedRows
from tpudist.xla import collectives, traces
from tpudist.xla.mesh import ReplicaMesh

_log = logging.getLogger("tpudist")


@dataclasses.dataclass(frozen=True)
class _Learnt:
    """What is learnt of a function in one round of traces, and known in the next one.

    Attributes:
        gathered: By the number of a gather of the rows of all replicas: that of its size among
            `sizes_gathered`.
        sizes_gathered: Sizes of one replica of which those of all are gathered.
        differing: Numbers of the values that look equal on all replicas, and depend on the rows.
    """

    gathered: tuple[tuple[int, int], ...] = ()
    sizes_gathered: tuple[RowSize, ...] = ()
    differing: frozenset[int] = frozenset()


class PartialBatch:
    """A replica function for partial batches.

    Attributes:
        program: Its program, with the numbers of real rows as its last inputs.
        proof: What of it is equal on every replica.
        found: What the call gives besides outputs, for any number of rows.
        takes_means: Whether the function may take means over a replica's own rows.
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
        """Traces the function for several numbers of rows.

        Args:
            body: The function.
            mesh: The replicas.
            shapes: Of the flat inputs; the last ones are the numbers of rows.
            stacked: Which of them hold one part per replica.
            causes: Why they differ between replicas, or None.
            first: What its first trace has found.

        Raises:
            ValueError: It cannot be followed.
        """
        self._body, self._mesh = body, mesh
        self._inputs: Inputs = body.call.inputs
        assert self._inputs.groups is not None, "some batch is partial"
        self._groups = self._inputs.groups
        end = len(shapes) - self.num_groups
        self._shapes, self._stacked = list(shapes[:end]), list(stacked[:end])
        self._all_shapes, self._all_stacked = shapes, stacked
        self._parts = [(number, rows) for number, rows, _ in first.parts]
        self._learnt, self._warned = _Learnt(), False
        self.takes_means = True
        try:
            while True:
                self._found: dict[Point, CallOutputs] = {}
                self._program = RowProgram(self._trace, self._full_sizes())
                self._numbers = self._find_numbers()
                self.found = self._describe_outputs()
                self.program = compile.trace(self._evaluate, mesh, shapes, stacked, body.call.name)
                self.proof = self._mark_rows(replica_equality.prove(self.program.closed, causes))
                unsettled = self._program.requirements.gathered or self._find_broken_claims()
                if not unsettled:
                    self._line_of_sum = self._find_sum_of_numbers()
                    return
                learnt = self._learn()
                if learnt == self._learnt:
                    raise RowsError(
                        "a function that jax.jit traced earlier gathers the rows of all replicas, "
                        "or calls strategy.run: call it without jax.jit"
                    )
                self._learnt = learnt
        except RowsError as error:
            raise self._refuse(error) from error

    def _full_sizes(self) -> Point:
        sizes = self._groups.sizes
        full = (*sizes, *(-(-rows // number) for number, rows in self._parts))
        known = tuple(max(rows, MIN_TRACED_ROWS) for rows in full)
        n = self._mesh.num_replicas
        return (*full, *(n * size.at(known) for size in self._learnt.sizes_gathered))

    def _learn(self) -> _Learnt:
        """What the next round of traces is to know; as before if nothing is new."""
        before = self._learnt
        sizes = list(before.sizes_gathered)
        gathered = dict(before.gathered)
        for index, size in self._program.requirements.gathered.items():
            own = self._symbols_of_replica(size)
            if own not in sizes:
                sizes.append(own)
            gathered[index] = sizes.index(own)
        differing = before.differing | self._find_broken_claims()
        return _Learnt(tuple(gathered.items()), tuple(sizes), differing)

    def keep_state(
        self,
        program: compile.ReplicaProgram,
        state: Mapping[int, int],
        averages: Sequence[Mapping[int, int]],
    ) -> compile.ReplicaProgram:
        """Returns the program, in which replicas without rows leave some state as it is.

        Args:
            program: `self.program`, or a program that was made from it.
            state: Outputs that are new state, each with the input that it replaces. It is left if
                one of the batches has no rows.
            averages: For each average, its total and its count in the same form. They are left if
                no batch has rows and a number is not finite: the mean over no rows.
        """
        if not state and not averages:
            return program

        def keep(*local: Any) -> list[Any]:
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
        """A size in the symbols of one replica, which are the first ones."""
        own = self.num_groups + len(self._parts)
        if any(i >= own for i in size.symbols):
            raise RowsError("a value that was gathered from all replicas is gathered again")
        return size.with_symbols(own)

    def _mark_rows(self, proof: replica_agreement.Agreement) -> replica_agreement.Agreement:
        """The proof, in which what has rows differs: replicas may have other numbers of them."""
        own = self.num_groups + len(self._parts)
        causes = list(proof.causes)
        for i, dims in self.rows_of_results().items():
            if any(k < own for _, size in dims for k in size.symbols):
                causes[i] = causes[i] or "the number of real rows"
        return dataclasses.replace(proof, causes=tuple(causes))

    @property
    def num_groups(self) -> int:
        """How many batches there are, each with its number of real rows."""
        return len(self._groups.sizes)

    def _evaluate(self, *local: Any) -> list[Any]:
        """The flat outputs for the flat local inputs, and the numbers of real rows."""
        values, counts = local[: -self.num_groups], local[-self.num_groups :]
        unknown = [None] * len(self._parts)
        zeros = [0] * len(self._parts)
        own = [size.at([*counts, *zeros]) for size in self._learnt.sizes_gathered]
        totals = collectives.all_reduce(ReduceOp.SUM, own) if own else []
        known = [*counts, *unknown, *totals]
        outputs = self._program.evaluate(known, self._pad(values))
        numbers = [jnp.asarray(x.at(known)) for x in self._numbers.values()]
        end = self.found.num_results - len(numbers)
        return [*outputs[:end], *numbers, *outputs[end:]]

    @property
    def dims_of_outputs(self) -> list[tuple[Dim, ...]]:
        """For each flat output, its dims."""
        dims = list(self._program.out_dims)
        end = self.found.num_results - len(self._numbers)
        return [*dims[:end], *[()] * len(self._numbers), *dims[end:]]

    def rows_of_results(self) -> dict[int, tuple[tuple[int, RowSize], ...]]:
        """For each result that has rows: the dims that they are, with their sizes."""
        rows = {}
        for i, dims in enumerate(self.dims_of_outputs):
            own = tuple((d, dim) for d, dim in enumerate(dims) if isinstance(dim, RowSize))
            if own and i < self.found.num_results:
                rows[i] = own
        return rows

    def warn_of_empty(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Warns once that means over rows are NaN on replicas that have none.

        Args:
            rows: For each batch, the number of its rows on each replica.
        """
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
        """Refuses numbers of rows for which the function is another one.

        Args:
            rows: For each batch, how many rows of it each replica has.

        Raises:
            ValueError: The function is another one for these, or cannot be followed.
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
            for point in dict.fromkeys(points):
                self._confirm_numbers(point)
        except RowsError as error:
            raise self._refuse(error, rows) from error

    def extents(
        self, result: int, rows: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """The dims of a result that are rows, each with how many each replica really has."""
        replicas = range(self._mesh.num_replicas)
        return [
            (dim, tuple(size_at(size, self._points_of(rows, i)[0]) for i in replicas))
            for dim, size in self.rows_of_results().get(result, ())
        ]

    def _points_of(self, rows: Sequence[tuple[int, ...]], replica: int) -> list[Point]:
        """The numbers of rows of a replica, with those that its parts may have then."""
        sizes, counts = self._groups.sizes, [each[replica] for each in rows]
        of_parts = []
        for number, whole in self._parts:
            # Of several batches of this size it may be any.
            reals = {n for n, size in zip(counts, sizes, strict=True) if size == whole} or {whole}
            of_parts.append(sorted({r for n in reals for r in (n // number, -(-n // number))}))
        points = [(*counts, *each) for each in itertools.product(*of_parts)]
        totals = tuple(
            sum(self._size_on(size, rows, i) for i in range(self._mesh.num_replicas))
            for size in self._learnt.sizes_gathered
        )
        return [(*point, *totals) for point in points]

    def _size_on(self, size: RowSize, rows: Sequence[tuple[int, ...]], replica: int) -> int:
        return size.at([*(each[replica] for each in rows), *[0] * len(self._parts)])

    def _trace(self, point: Point) -> Any:
        found, program = self._trace_at(point)
        if not _are_alike(next(iter(self._found.values()), found), found):
            raise RowsError("it returns a different structure, or assigns different Variables")
        self._found[point] = found
        return program

    def _trace_at(self, point: Point, factor: int = 1) -> tuple[CallOutputs, Any]:
        """A trace in which the axis of replicas is `factor` times as long."""
        own = self.num_groups + len(self._parts)
        gathered = {index: point[own + which] for index, which in self._learnt.gathered}
        rows = TracedRows(
            point[: self.num_groups],
            point[self.num_groups : own],
            gathered,
            self._learnt.differing,
        )
        found = CallOutputs()
        first = next(iter(self._found.values()), found)
        changed = {leaf for leaf, _ in first.nnx}
        shapes = self._resize(point)
        # A function that JAX has traced before would keep the numbers of that trace, and what it
        # traces here can be lowered by nobody else.
        with traces.separate_caches():
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
        """The line that uses a number of rows times the number of replicas; None if no line does.

        The cost is one more trace.
        """
        point = self._program.points[0]
        try:
            found, program = self._trace_at(point, degree.REPLICAS_FACTOR)
        except Exception:  # whatever the function raises for another number of replicas
            return None
        first = self._found[point].result
        for i, (kind, value) in enumerate(found.result):
            if i in self._numbers and kind == "itself" and not _are_equal(value, first[i][1]):
                return ""
        return psum_numbers.find_line(self._program.labelled, program)

    def _resize(self, point: Point) -> list[jax.ShapeDtypeStruct]:
        shapes = list(self._shapes)
        offset = len(self._body.variables) + self._inputs.num_nnx
        for k, rows in enumerate(self._inputs.rows_of_arguments):
            for dim, group in rows:
                x, at = shapes[offset + k], 1 + dim
                shape = (*x.shape[:at], point[group], *x.shape[at + 1 :])
                shapes[offset + k] = jax.ShapeDtypeStruct(shape, x.dtype)
        return shapes

    def _pad(self, values: Sequence[Any]) -> list[Any]:
        """Inputs with as many rows as the program has: it has two at least."""
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

    def _find_numbers(self) -> dict[int, Piecewise]:
        """The results that are Python numbers and depend on the rows, as `x.shape[0]` does."""
        points = self._program.points
        numbers: dict[int, Piecewise] = {}
        for i, (kind, first) in enumerate(self._found[points[0]].result):
            values = [self._found[p].result[i][1] for p in points]
            if kind != "itself" or all(x is first or _are_equal(x, first) for x in values):
                continue
            number = None
            if all(type(x) is int for x in values):
                number = fit_size(tuple(values), points)
            elif all(isinstance(x, int | float) for x in values):
                number = fit_number([float(x) for x in values], points)
            if not isinstance(number, RowSize | RowNumber):
                raise RowsError(
                    f"it returns {values[0]!r} with {points[0]} rows and {values[1]!r} with "
                    f"{points[1]} rows: this value is not an array, but depends on the number of "
                    "rows"
                )
            numbers[i] = Piecewise(number, self._find_pieces(i, number))
        return numbers

    def _find_pieces(self, result: int, number: RowSize | RowNumber) -> tuple[Piece, ...]:
        """What a result that is a number is instead, where batches have one row or none."""
        pieces = []
        for point, found in self._found.items():
            kind, actual = found.result[result]
            few = tuple((i, count) for i, count in enumerate(point) if count < MIN_TRACED_ROWS)
            if few and kind == "itself" and type(actual) in (int, float):
                if not _follows(actual, number.at(point)):
                    pieces.append(Piece(few, actual))
        return tuple(sorted(pieces, key=lambda piece: -len(piece.counts)))

    def _confirm_numbers(self, point: Point) -> None:
        if point not in self._found:
            return
        first = self._found[self._program.points[0]].result
        for i, (kind, actual) in enumerate(self._found[point].result):
            number = self._numbers.get(i)
            if number is not None:
                same = _follows(actual, number.at(point))
            else:
                same = kind == "array" or actual is first[i][1] or _are_equal(actual, first[i][1])
            if not same:
                raise RowsError(
                    f"it returns {actual!r} with {point} rows, which does not follow from other "
                    "numbers of rows"
                )

    def _describe_outputs(self) -> CallOutputs:
        base = self._found[self._program.points[0]]
        result = list(base.result)
        for k, i in enumerate(self._numbers):
            result[i] = ("array", base.num_results + k)
        for dims in self._program.out_dims[base.num_results :]:
            if any(map(is_rows, dims)):
                raise RowsError("it assigns state with as many elements as a replica has rows")
        return dataclasses.replace(
            base,
            result=result,
            num_results=base.num_results + len(self._numbers),
            plain=False,
        )

    def _refuse(
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


def _follows(actual: float, predicted: Any) -> bool:
    return abs(float(predicted) - actual) <= 1e-5 * abs(actual)


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or (a != a and b != b)
    except Exception:
        return False
