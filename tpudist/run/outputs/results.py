"""What the trace of a replica function gave: its program, and what becomes of each output.

A result is merged over the replicas: one plain array where they agree, a PerReplica where they do
not, without the padding of a partial batch; what was no array comes back as itself.
"""

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from tpudist.lowering import compile, placement
from tpudist.reduce_op import ReduceOp
from tpudist.reductions import cross_device_ops
from tpudist.run.arguments.call_arguments import Call
from tpudist.state import nnx_contents
from tpudist.state.variable import Variable
from tpudist.values import drift, loss_shares
from tpudist.values.per_replica import PerReplica, record_key
from tpudist.xla import collectives
from tpudist.xla.mesh import ReplicaMesh

if TYPE_CHECKING:
    from tpudist.programs.degrees.degree_faults import Fault
    from tpudist.run.remarks import Remark


class RowsOfResults(Protocol):
    """What a trace knows of partial batches; see `run.partial_batch.PartialBatch`."""

    def check(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Refuses numbers of rows for which the function is another one."""
        ...

    def warn_of_empty(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Warns once that means over rows are NaN on replicas that have none."""
        ...

    def extents(
        self, result: int, rows: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """The dims of a result that are rows, each with how many each replica really has."""
        ...


@dataclasses.dataclass
class CallOutputs:
    """What one call of the function gave, in the order of the flat outputs."""

    treedef: Any = None
    result: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    num_results: int = 0
    variables: list[Variable] = dataclasses.field(default_factory=list)
    read: set[Variable] = dataclasses.field(default_factory=set)
    nnx: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    structure_change: str = ""
    # The arrays of NNX objects that `run` in the function has made one for each replica.
    local: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    plain: bool = False
    # The trace is to be made again, with the Variables that it made; those with computed values.
    incomplete: bool = False
    computed: list[Variable] = dataclasses.field(default_factory=list)
    # The Variables that are references in the trace, in the order in which those were made.
    references: list[Variable] = dataclasses.field(default_factory=list)
    interruption: BaseException | None = None


class Outcome:
    """What a compiled step returns beside new state, and the trace that explains it.

    Attributes:
        results: A list of arrays, or what the function returned if it needs no merging.
        traced: The trace.
    """

    __slots__ = ("results", "traced")

    def __init__(self, results: Any, traced: "TracedStep"):
        """Made in the trace, and again by JAX at each call."""
        self.results = results
        self.traced = traced

    def any_array(self) -> jax.Array | None:
        """One of the arrays, or None if there is none."""
        node = self.results
        while not isinstance(node, jax.Array):  # the first child of each; a large tree has no hurry
            if isinstance(node, dict) and node:
                node = next(iter(node.values()))
            elif isinstance(node, list | tuple) and node:
                node = node[0]
            else:
                return next(iter(jax.tree.leaves(self.results)), None)
        return node


# JAX keeps the structures that compiled functions return, and must not keep Variables alive so.
jax.tree_util.register_pytree_node(
    Outcome,
    lambda x: ((x.results,), weakref.ref(x.traced)),
    lambda traced, children: Outcome(children[0], traced()),  # type: ignore[arg-type]
)


@dataclasses.dataclass(eq=False)
class TracedStep:
    """A replica function traced for one signature.

    Attributes:
        program: Its jaxpr.
        all_variables: Shapes of all the Variables that were inputs of the trace.
        positions: For each Variable that is read or written, its position among them.
        stack_outputs: Which outputs differ and leave stacked.
        aggregated: Outputs that are combined at the end of the step, by reduction.
        mesh: The replicas.
        partial: For partial batches: what was learnt of them.
        remarks: What the user is to be warned of.
        returned: Outputs that are state given back; see `returned_state`.
        drifting: Outputs that replace equal state and differ between replicas.
        faults: Values of the program that are not those of one device; see `degree_faults`.
        count_run: Counts a run, once other processes are known to run the same; see `first_run`.
        shares: Results that are shares of a loss; see `loss_numbers`.
    """

    program: compile.ReplicaProgram
    found: CallOutputs
    all_variables: list[jax.ShapeDtypeStruct]
    positions: dict[Variable, int]
    stack_outputs: list[bool]
    aggregated: dict[ReduceOp | None, list[int]]
    mesh: ReplicaMesh
    partial: RowsOfResults | None = None
    remarks: tuple["Remark", ...] = ()
    returned: dict[int, int] = dataclasses.field(default_factory=dict)
    drifting: dict[int, drift.Drift] = dataclasses.field(default_factory=dict)
    faults: tuple["Fault", ...] = ()
    count_run: Callable[[], None] | None = None
    shares: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def variables(self) -> set[Variable]:
        """The Variables that the function reads or writes."""
        return set(self.positions)

    @property
    def variable_order(self) -> list[Variable]:
        """The same, in the order in which they were made."""
        return sorted(self.positions, key=self.positions.__getitem__)

    @property
    def written_variables(self) -> set[Variable]:
        """The Variables that the function assigns."""
        return set(self.found.variables)

    @property
    def written_leaves(self) -> set[int]:
        """The NNX leaves that the function changes."""
        return {leaf for leaf, _ in self.found.nnx}

    def emit(
        self,
        mesh: ReplicaMesh,
        captured: Sequence[Variable],
        values: Sequence[Any],
        state: Sequence[tuple[str, Any, int]],
        place_outputs: Callable[[list[Any], dict[int, int]], list[Any]],
    ) -> tuple[list[Any], Outcome]:
        """Puts the program into the function that `jit` traces.

        Args:
            mesh: The replicas.
            captured: The Variables among `values`, first.
            values: All inputs.
            state: What is to be written back: ("variable", Variable, position of its input) or
                ("nnx", (leaf, array of the leaf), position of its input).
            place_outputs: Says of the results that are state given back where they lie.
        """
        # State that lives in host memory is on the devices while the step runs.
        given, values = values, [placement.to_device(x) for x in values]
        run = compile.spread(self.program, mesh, self.stack_outputs or [False], self._finish)
        outputs = run(*self.inputs_of_program(captured, values))
        if not self.stack_outputs:
            return list(given[position] for _, _, position in state), Outcome(outputs, self)
        n = self.found.num_results
        new: dict[Any, Any] = dict(zip(self.found.variables, outputs[n:], strict=False))
        new |= dict(zip(self.found.nnx, outputs[n + len(self.found.variables) :], strict=True))
        written = [
            placement.to_memory_of(new[key], given[position]) if key in new else given[position]
            for _, key, position in state
        ]
        results = place_outputs(list(outputs[:n]), self.returned)
        if self._plain:
            results = self.found.treedef.unflatten(results)
        return written, Outcome(results, self)

    def inputs_of_program(self, captured: Sequence[Variable], values: Sequence[Any]) -> list[Any]:
        """Returns the inputs of the program: all Variables, and then what else is fed."""
        fed = dict(zip(captured, values, strict=False))
        at = {position: fed[v] for v, position in self.positions.items()}
        variables = [
            at[i] if i in at else jnp.zeros(x.shape, x.dtype)
            for i, x in enumerate(self.all_variables)
        ]
        return [*variables, *values[len(captured) :]]

    def _finish(self, outputs: list[jax.Array]) -> list[jax.Array]:
        if not outputs:
            # XLA fails over a program of all devices that only prints or calls back: it takes a
            # `shard_map` without results apart. With one it also shows when the step has ended.
            return [jnp.zeros((), jnp.bool_)]
        return aggregate_outputs(outputs, self.aggregated)

    def result(self, results: Any, now: Call) -> Any:
        """What the function returned in the call `now`, merged over replicas."""
        if self._plain:
            return results
        merged = []
        nodes = None
        for kind, what in self.found.result:
            if kind == "array":
                merged.append(self._merge(what, results[what], now.rows))
            elif kind == "argument":
                merged.append(now.leaves()[what])
            elif kind == "object":
                nodes = nodes or nnx_contents.nodes_of(now.binding.objects())
                merged.append(nodes[what])
            else:
                merged.append(what)
        return self.found.treedef.unflatten(merged)

    def check_rows(self, now: Call, *, is_rehearsal: bool) -> None:
        """Refuses numbers of real rows for which the function is another one.

        Args:
            now: The call.
            is_rehearsal: Whether the call is made to verify the step, without notes for the user.
        """
        if self.partial is None:
            return
        if not is_rehearsal:
            self.partial.warn_of_empty(now.rows)
        self.partial.check(now.rows)

    def __post_init__(self):
        self._keys = {} if self.found.treedef is None else self._find_keys()
        self._plain = (
            self.found.plain
            and bool(self.stack_outputs)
            and all(kind == "array" for kind, _ in self.found.result)
            and not any(self.stack_outputs[: self.found.num_results])
            and self.partial is None
        )

    def _find_keys(self) -> dict[int, str]:
        """By result, the innermost key of a dict under which the function returned it.

        Containers that JAX does not know are left out.
        """
        result = self.found.result
        tree = self.found.treedef.unflatten(range(len(result)))
        found = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            keys = [x.key for x in path if isinstance(x, jax.tree_util.DictKey)]
            if isinstance(leaf, int) and keys and isinstance(keys[-1], str):
                kind, what = result[leaf]
                if kind == "array":
                    found[what] = keys[-1]
        return found

    def _merge(self, i: int, array: jax.Array, rows: Sequence[tuple[int, ...]]) -> Any:
        extents = self.partial.extents(i, rows) if self.partial is not None else []
        if not self.stack_outputs[i]:
            # It has the rows of all replicas, or none.
            for dim, sizes in extents:
                array = jax.lax.slice_in_dim(array, 0, sizes[0], axis=dim)
            return array
        if not extents:
            value = PerReplica(array)
            if i in self.shares:
                loss_shares.record(value, self.shares[i])
            if i in self._keys:
                record_key(value, self._keys[i])
            return drift.record(value, self.drifting[i]) if i in self.drifting else value
        (dim, first), *others = extents
        return PerReplica(array, first, dim, tuple(others))


def aggregate_outputs(
    outputs: Sequence[jax.Array], aggregated: dict[ReduceOp | None, list[int]]
) -> list[jax.Array]:
    """What each replica has at the end of its program: `outputs`, some combined over replicas."""
    outputs = list(outputs)
    for op, indices in aggregated.items():
        some = [outputs[i] for i in indices]
        done = collectives.broadcast(some) if op is None else cross_device_ops.all_reduce(op, some)
        for i, x in zip(indices, done, strict=True):
            outputs[i] = x.astype(outputs[i].dtype)
    return outputs
