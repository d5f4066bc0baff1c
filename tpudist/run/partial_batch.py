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
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp

from tpudist.lowering import compile
from tpudist.options.member_names import format_counts
from tpudist.programs import replica_agreement, replica_equality
from tpudist.programs.jaxprs import ClosedJaxpr
from tpudist.programs.rows import psum_numbers
from tpudist.programs.rows.errors import NumbersLearned, RowsError
from tpudist.programs.rows.row_program import MIN_TRACED_ROWS, RowProgram
from tpudist.programs.rows.row_sizes import Dim, Point, RowSize, is_rows, size_at
from tpudist.reduce_op import ReduceOp
from tpudist.run import row_dependent_numbers, row_traces
from tpudist.run.frame.traced_rows import TracedRows
from tpudist.run.outputs.results import CallOutputs, LeafKind, ResultLeaf
from tpudist.run.replica_body import ReplicaBody, share_of_replica
from tpudist.run.row_dependent_numbers import are_equal
from tpudist.run.row_traces import Knowledge, RowTraces
from tpudist.xla import collectives
from tpudist.xla.mesh import ReplicaMesh

_log = logging.getLogger("tpudist")


class PartialBatch:
    """A replica function for partial batches.

    Sizes in the program are functions of *symbols*, the numbers of a point (`row_traces`). The
    first symbols, rows of batches and of parts, are the replica's own. Those of gathers depend on
    all replicas.

    Args:
        shapes: Shapes of the flat inputs; the last ones are the numbers of rows.
        stacked: For each input, whether it has one part per replica.
        causes: For each input, why it differs between replicas, or None.
        first: Rows of the trace for full batches.
        traced: The outputs and the program of that trace; None if functions of
            `tpudist.rowwise` are not kept whole in it.

    Attributes:
        program: Program of one replica, with the numbers of real rows as the last inputs.
        outputs: The outputs of the call, for any number of rows.
        proof: Proof of the outputs that are equal on all replicas.
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
        traced: tuple[CallOutputs, ClosedJaxpr] | None,
    ):
        self._body, self._mesh = body, mesh
        assert body.call.inputs.groups is not None, "some batch is partial"
        self._groups = body.call.inputs.groups
        self._num_groups = len(self._groups.sizes)
        self._shapes, self._stacked = shapes, stacked
        self._parts = [(number, rows) for number, rows, _ in first.parts]
        self._num_own_symbols = self._num_groups + len(self._parts)
        self._knowledge, self._has_warned = Knowledge(), False
        self.takes_means = True
        try:
            if not self._follow_with_few_traces(causes, traced):
                self._follow(causes)
        except RowsError as error:
            raise self._make_error(error) from error

    def _follow_with_few_traces(
        self, causes: Sequence[str | None], traced: tuple[CallOutputs, ClosedJaxpr] | None
    ) -> bool:
        """Creates the program from `traced` and one more trace; False if that is not enough."""
        counts, full = self._body.call.counts, self._full_sizes()
        if not counts or full != self._groups.sizes:  # parts of batches have sizes of their own
            return False
        try:
            self._start_round(causes, traced and (full, *traced), counts)
        except RowsError:
            return False  # all traces show whether it is an error, and which one
        return not self._is_unsettled()

    def _follow(self, causes: Sequence[str | None]) -> None:
        # A fixpoint: a round may find that the function gathers rows of all replicas, or that
        # values which look equal are not. The next round knows that. It ends because knowledge only
        # grows, and a program has finitely many gathers and values; if a round finds something and
        # learns nothing new, the function cannot be followed.
        while True:
            self._start_round(causes)
            if not self._is_unsettled():
                return
            knowledge = self._extend_knowledge()
            if knowledge == self._knowledge:
                raise RowsError(
                    "a function that jax.jit traced earlier gathers the rows of all replicas, or "
                    "calls strategy.run: call it without jax.jit"
                )
            self._knowledge = knowledge

    def _start_round(
        self,
        causes: Sequence[str | None],
        first: tuple[Point, CallOutputs, ClosedJaxpr] | None = None,
        counts: Collection[Point] | None = None,
    ) -> None:
        """Creates the program with the knowledge so far; see `RowTraces` and `RowProgram`."""
        self._traces = RowTraces(
            self._body,
            self._mesh,
            self._shapes[: -self._num_groups],
            self._stacked[: -self._num_groups],
            len(self._parts),
            self._knowledge,
            first,
        )
        self._program = RowProgram(self._traces.trace, self._full_sizes(), counts)
        self._formulas = row_dependent_numbers.find_numbers(
            self._traces.outputs, self._program.points, self._num_groups
        )
        self.outputs = self._describe_outputs()
        name = self._body.call.name
        self.program = compile.trace(self._evaluate, self._mesh, self._shapes, self._stacked, name)
        self.proof = self._mark_rows(replica_equality.prove(self.program.closed, causes))
        if not self._is_unsettled():
            self._has_sum_of_numbers, self._line_of_sum = self._find_sum_of_numbers()

    def _is_unsettled(self) -> bool:
        return bool(self._program.requirements.gathered or self._find_broken_claims())

    def _full_sizes(self) -> Point:
        """Returns the point of full batches; parts of a split batch are rounded up."""
        sizes = self._groups.sizes
        full = (*sizes, *(-(-rows // number) for number, rows in self._parts))
        # Sizes that are gathered are evaluated at the padded numbers of rows, at which the program
        # is traced: a formula may not hold below `MIN_TRACED_ROWS`.
        padded = tuple(max(rows, MIN_TRACED_ROWS) for rows in full)
        n = self._mesh.num_replicas
        return (*full, *(n * size.at(padded) for size in self._knowledge.sizes_gathered))

    def _extend_knowledge(self) -> Knowledge:
        """Returns the knowledge for the next round of traces; the same if nothing is new."""
        before = self._knowledge
        sizes = list(before.sizes_gathered)
        gathered = dict(before.gathered)
        for index, size in self._program.requirements.gathered.items():
            size = self._express_in_rows_of_replica(size)
            if size not in sizes:
                sizes.append(size)
            gathered[index] = sizes.index(size)
        differing = before.differing | self._find_broken_claims()
        return Knowledge(tuple(gathered.items()), tuple(sizes), differing)

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

        first = len(self._shapes) - self._num_groups
        counts = range(first, len(self._shapes))

        def keep(inputs: dict[int, jax.Array], outputs: dict[int, jax.Array]) -> list[jax.Array]:
            rows = jnp.stack([inputs[i] for i in counts])
            for i, source in state.items():
                outputs[i] = jnp.where(rows.min() == 0, inputs[source], outputs[i])
            for average in averages:
                old = {i: share_of_replica(inputs[source]) for i, source in average.items()}
                is_lost = [~jnp.isfinite(outputs[i]) & jnp.isfinite(old[i]) for i in average]
                is_lost = (rows.max() == 0) & jnp.stack(is_lost).any()
                for i in average:
                    outputs[i] = jnp.where(is_lost, old[i], outputs[i])
            return [outputs[i] for i in changed]

        pairs = [*state.items(), *(pair for average in averages for pair in average.items())]
        changed = list(dict.fromkeys(i for i, _ in pairs))
        inputs = list(dict.fromkeys([*(source for _, source in pairs), *counts]))
        name = self._body.call.name
        return compile.change_outputs(program, self._mesh, keep, inputs, changed, name)

    def _find_broken_claims(self) -> frozenset[int]:
        return frozenset((*self._program.requirements.broken_claims, *self.proof.broken_claims))

    def _express_in_rows_of_replica(self, size: RowSize) -> RowSize:
        """Returns a size as a function of the replica's own rows.

        Raises:
            RowsError: If it depends on gathered rows, or on the rows of a part of a batch, which no
                replica knows of the others.
        """
        if any(i >= self._num_own_symbols for i in size.symbols):
            raise RowsError("a value that was gathered from all replicas is gathered again")
        if any(i >= self._num_groups for i in size.symbols):
            raise RowsError(
                "it gathers the rows of a microbatch, whose number differs between replicas and "
                "microbatches: gather the whole batch"
            )
        return size.with_symbols(self._num_own_symbols)

    def _mark_rows(self, proof: replica_agreement.Agreement) -> replica_agreement.Agreement:
        """Returns the proof in which outputs with rows differ: replicas may have other numbers."""
        causes = list(proof.causes)
        for i, dims in self._rows_of_results().items():
            if any(k < self._num_own_symbols for _, size in dims for k in size.symbols):
                causes[i] = causes[i] or "the number of real rows"
        return dataclasses.replace(proof, causes=tuple(causes))

    def _evaluate(self, *local: jax.Array) -> list[jax.Array]:
        """Returns the flat outputs for the flat local inputs, whose last ones are real rows."""
        values, counts = local[: -self._num_groups], local[-self._num_groups :]
        # The program does not know the rows of parts. Zeros do for sizes that are gathered, because
        # none of these depends on parts (`_express_in_rows_of_replica`).
        unknown = [None] * len(self._parts)
        zeros = [0] * len(self._parts)
        sizes = [size.at([*counts, *zeros]) for size in self._knowledge.sizes_gathered]
        totals = collectives.all_reduce(ReduceOp.SUM, sizes) if sizes else []
        known = [*counts, *unknown, *totals]
        padded = row_traces.pad(self._body, values, self._program.full)
        outputs = self._program.evaluate(known, padded)
        numbers = [jnp.asarray(x.at(known)) for x in self._formulas.values()]
        end = self.outputs.num_results - len(numbers)
        return [*outputs[:end], *numbers, *outputs[end:]]

    def _dims_of_outputs(self) -> list[tuple[Dim, ...]]:
        """Returns the dims of each flat output."""
        dims = list(self._program.out_dims)
        end = self.outputs.num_results - len(self._formulas)
        return [*dims[:end], *[()] * len(self._formulas), *dims[end:]]

    def _rows_of_results(self) -> dict[int, tuple[tuple[int, RowSize], ...]]:
        """Returns the dims that are rows of each result that has some, with their sizes."""
        rows = {}
        for i, dims in enumerate(self._dims_of_outputs()[: self.outputs.num_results]):
            sizes = tuple((d, dim) for d, dim in enumerate(dims) if isinstance(dim, RowSize))
            if sizes:
                rows[i] = sizes
        return rows

    def warn_of_empty(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Warns once that means over rows are NaN on replicas that have none."""
        empty = [i for i, counts in enumerate(zip(*rows, strict=True)) if 0 in counts]
        if empty and self.takes_means and not self._has_warned:
            self._has_warned = True
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
            if self._has_sum_of_numbers and any(len(set(counts)) > 1 for counts in rows):
                raise RowsError(
                    "jax.lax.psum of a Python number, such as x.shape[0], multiplies it by the "
                    "number of replicas, but here replicas have different numbers of rows. Sum an "
                    "array: jax.lax.psum(jnp.asarray(x.shape[0]), axis)",
                    self._line_of_sum,
                )
            outputs = self._traces.outputs
            first = outputs[self._program.points[0]]
            for point in dict.fromkeys(points):
                try:
                    row_dependent_numbers.confirm_numbers(outputs, first, self._formulas, point)
                except RowsError:
                    if self._program.has_learned(point):
                        raise
                    raise NumbersLearned from None
        except RowsError as error:
            raise self._make_error(error, rows) from error

    def extents(
        self, result: int, rows: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Returns the dims of a result that are rows, each with the real rows of each replica."""
        replicas = range(self._mesh.num_replicas)
        return [
            (dim, tuple(size_at(size, self._points_of(rows, i)[0]) for i in replicas))
            for dim, size in self._rows_of_results().get(result, ())
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

    def _find_sum_of_numbers(self) -> tuple[bool, str]:
        """Returns whether a number of rows is used times the number of replicas, and its line.

        The line is empty if no equation of the program shows the number.
        """
        # JAX's `psum` of a Python number multiplies it by the number of replicas in the trace, so
        # no equation shows it. A trace with a longer axis has another number there. It costs one
        # trace.
        point = self._program.points[0]
        if not self._formulas and not psum_numbers.has_numbers(self._program.labelled):
            return False, ""
        try:
            outputs, program = self._traces.trace_more_replicas(point)
        except Exception:
            # Whatever the function raises for another number of replicas. Such functions are not
            # checked: most of them sum no number, and must not be rejected.
            return False, ""
        first = self._traces.outputs[point].result
        for i, (kind, value) in enumerate(outputs.result):
            is_number = i in self._formulas and kind is LeafKind.VALUE
            if is_number and not are_equal(value, first[i].item):
                return True, ""
        line = psum_numbers.find_line(self._program.labelled, program)
        return line is not None, line or ""

    def _describe_outputs(self) -> CallOutputs:
        base = self._traces.outputs[self._program.points[0]]
        result = list(base.result)
        for k, i in enumerate(self._formulas):
            result[i] = ResultLeaf(LeafKind.ARRAY, base.num_results + k)
        for dims in self._program.out_dims[base.num_results :]:
            if any(map(is_rows, dims)):
                raise RowsError("it assigns state with as many elements as a replica has rows")
        return dataclasses.replace(
            base,
            result=result,
            num_results=base.num_results + len(self._formulas),
        )

    def _make_error(
        self, error: RowsError, rows: Sequence[tuple[int, ...]] | None = None
    ) -> ValueError:
        have = f" ({'; '.join(map(format_counts, rows))} rows on the replicas)" if rows else ""
        where = f" At {error.line}." if error.line else ""
        return ValueError(
            f"'{self._body.call.name}' received a partial batch{have}, and tpudist cannot follow "
            f"its rows: {error.reason}.{where} Padding rows could change the result there, so the "
            "step is not run. Drop partial batches (InputOptions(partial_batch='drop')), or write "
            "the operation in another way. If the rows of each batch are a multiple of "
            f"{self._mesh.num_replicas}, the number of replicas, partial_batch='shrink' gives all "
            "replicas equal parts without padding."
        )
