"""The trace of a replica function: its program, and how each output becomes a result or new state.

A result is merged over the replicas: one plain array if they agree, a PerReplica if they do not,
without the padding of a partial batch. A result that is not an array is returned unchanged.
"""

import dataclasses
import enum
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from tpudist.array_types import PyTree
from tpudist.lowering import compile, placement
from tpudist.reduce_op import ReduceOp
from tpudist.reductions import cross_device_ops
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.run.dispatch.step_plan import StateSlot
from tpudist.state import nnx_contents
from tpudist.state.variable import Variable
from tpudist.values import drift, loss_shares
from tpudist.values.per_replica import PerReplica, record_key
from tpudist.xla import collectives
from tpudist.xla.compiler import garbage, phases
from tpudist.xla.compiler.phases import Phase
from tpudist.xla.mesh import ReplicaMesh

if TYPE_CHECKING:
    from tpudist.programs.degrees.degree_faults import Fault
    from tpudist.run.trace_warnings import TraceWarning


class RowsOfResults(Protocol):
    """The rows of results in a partial batch; see `run.partial_batch.PartialBatch`.

    `rows` are the real rows of each replica, for each batch.
    """

    def check(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Raises for numbers of rows that the program does not support."""
        ...

    def warn_of_empty(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Warns once that means over rows are NaN on replicas that have none."""
        ...

    def extents(
        self, result: int, rows: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Returns the dims of a result that are rows, each with the real rows of each replica."""
        ...


class LeafKind(enum.Enum):
    """The origin of a leaf of the result."""

    ARRAY = "an output of the program"
    ARGUMENT = "a flat argument, unchanged"
    OBJECT = "an NNX object among the arguments"
    VALUE = "a Python value that the function returned when it was traced"


class ResultLeaf(NamedTuple):
    """A leaf of the result: the number of the output, argument or NNX node, or the value itself."""

    kind: LeafKind
    item: Any


@dataclasses.dataclass
class CallOutputs:
    """The outputs of one call of the function, in the order of the flat outputs.

    Flat outputs are the arrays of results, then the values of Variables, then NNX arrays, then the
    initial values of `computed`.

    Attributes:
        treedef: Nesting of the result.
        result: The leaves of the result.
        read: The Variables that were read.
        num_results: Number of outputs that are results, the first ones.
        variables: The Variables that were assigned.
        nnx: The NNX arrays that were changed: pairs of a leaf of the binding and an array of it.
        structure_change: Description of a change to the structure of an NNX object; empty without.
        local: NNX arrays to which a nested `run` has given one value per replica.
        incomplete: Whether the function must be traced again, with the Variables that it created.
        computed: Created Variables whose initial values are the last outputs.
        references: The Variables that are references in the trace, in order of their creation.
        interruption: The exception that ended the trace, if one did.
    """

    treedef: Any = None
    result: list[ResultLeaf] = dataclasses.field(default_factory=list)
    num_results: int = 0
    variables: list[Variable] = dataclasses.field(default_factory=list)
    read: set[Variable] = dataclasses.field(default_factory=set)
    nnx: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    structure_change: str = ""
    local: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    incomplete: bool = False
    computed: list[Variable] = dataclasses.field(default_factory=list)
    references: list[Variable] = dataclasses.field(default_factory=list)
    interruption: BaseException | None = None


class Outcome:
    """The results of a compiled step, and the trace that explains them.

    The trace creates it, and JAX creates it again at each call, because it is a pytree node.

    Attributes:
        results: The arrays of the results; at least one if the program writes no state.
    """

    __slots__ = ("results", "traced")

    def __init__(self, results: list[jax.Array], traced: "TracedStep"):
        self.results = results
        self.traced = traced


_new_outcome = object.__new__


def _unflatten_outcome(reference: "weakref.ref[TracedStep]", children: tuple[PyTree]) -> Outcome:
    traced = reference()
    assert traced is not None, "each call of a step has its trace"
    outcome = _new_outcome(Outcome)  # without `__init__`: one function call less per step
    outcome.results, outcome.traced = children[0], traced
    return outcome


# The auxiliary data is a weak reference: JAX keeps the structures that compiled functions return,
# and must not keep Variables alive that way.
jax.tree_util.register_pytree_node(
    Outcome, lambda x: ((x.results,), weakref.ref(x.traced)), _unflatten_outcome
)


@dataclasses.dataclass(eq=False)
class TracedStep:
    """A replica function traced for one signature.

    Attributes:
        program: The program of one replica.
        found: The outputs of the function, as they were found by the trace.
        all_variables: Shapes of all Variables that were inputs of the trace.
        positions: For each Variable that is read or written, its position among them.
        stack_outputs: For each output, whether it differs and leaves with one part per replica.
        aggregated: Outputs that are combined at the end of the step, by reduction.
        mesh: The replicas.
        partial: The rows of results, if some batch is partial.
        warnings: Warnings for the user, which the first run shows.
        returned: Outputs that are returned state, each with the number of its input after the
            Variables; see `returned_state`.
        replaced: Outputs that are new state, each with the number of its input.
        drifting: Outputs that replace equal state and differ between replicas.
        faults: Values that do not match those on one device; see `degree_faults`.
        count_run: Counts a run, once other processes are known to run the same; see `first_run`.
        shares: Results that are shares of a loss, with a line of the user; see `loss_numbers`.
    """

    program: compile.ReplicaProgram
    found: CallOutputs
    all_variables: list[jax.ShapeDtypeStruct]
    positions: dict[Variable, int]
    stack_outputs: list[bool]
    aggregated: dict[ReduceOp | None, list[int]]
    mesh: ReplicaMesh
    partial: RowsOfResults | None = None
    warnings: tuple["TraceWarning", ...] = ()
    returned: dict[int, int] = dataclasses.field(default_factory=dict)
    replaced: dict[int, int] = dataclasses.field(default_factory=dict)
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
        """The Variables that the function reads or writes, in the order of their creation."""
        return sorted(self.positions, key=self.positions.__getitem__)

    @property
    def written_variables(self) -> set[Variable]:
        """The Variables that the function assigns."""
        return set(self.found.variables)

    @property
    def written_leaves(self) -> set[int]:
        """The NNX leaves that the function changes."""
        return {leaf for leaf, _ in self.found.nnx}

    @garbage.collect_rarely()
    @phases.measure(Phase.LOWERING)
    def emit(
        self,
        mesh: ReplicaMesh,
        captured: Sequence[Variable],
        values: Sequence[jax.Array],
        state: Sequence[StateSlot],
        place_results: Callable[[list[jax.Array], dict[int, int]], list[jax.Array]],
    ) -> tuple[list[jax.Array], Outcome]:
        """Adds the program to the function that `jit` traces.

        Args:
            captured: The Variables that are the first of `values`.
            state: State to write back; see `StepPlan.state`.
            place_results: Called with the results and `returned`; returns the results, with
                returned state placed like the state that it replaces.

        Returns:
            The new state, and the outcome.
        """
        # State that lives in host memory is on the devices while the step runs.
        inputs, values = values, [placement.to_device(x) for x in values]
        run = compile.spread(self.program, mesh, self.stack_outputs or [False], self._finish)
        outputs = run(*self.inputs_of_program(captured, values))
        if not self.stack_outputs:
            return [inputs[slot.position] for slot in state], Outcome(outputs, self)
        n = self.found.num_results
        new: dict[Any, Any] = dict(zip(self.found.variables, outputs[n:], strict=False))
        new |= dict(zip(self.found.nnx, outputs[n + len(self.found.variables) :], strict=True))
        # `state` is the state that any trace of the step writes: all its programs have the same
        # outputs. State that only other traces write is returned unchanged.
        written = [
            placement.to_memory_of(new[key], inputs[position]) if key in new else inputs[position]
            for key, position in state
        ]
        return written, Outcome(place_results(list(outputs[:n]), self.returned), self)

    def inputs_of_program(
        self, captured: Sequence[Variable], values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns the inputs of the program: all Variables, and then the other values."""
        # Variables that the function does not use are not fed. XLA drops the zeros in their place.
        fed = dict(zip(captured, values, strict=False))
        value_at = {position: fed[v] for v, position in self.positions.items()}
        variables = [
            value_at[i] if i in value_at else jnp.zeros(x.shape, x.dtype)
            for i, x in enumerate(self.all_variables)
        ]
        return [*variables, *values[len(captured) :]]

    def _finish(self, outputs: list[jax.Array]) -> list[jax.Array]:
        if not outputs:
            # XLA fails on a program of all devices without a result, which only prints or calls
            # back. This result, for which `emit` names a placement, also shows when the step ends.
            return [jnp.zeros((), jnp.bool_)]
        return aggregate_outputs(outputs, self.aggregated)

    def result(self, results: list[jax.Array], call: RunCall | None) -> PyTree:
        """Returns the result of the function, merged over replicas, for `Outcome.results`.

        `call` may be None if `needs_call` is false and all batches are full.
        """
        if self.are_leaves:
            return self.found.treedef.unflatten(results)
        merged = []
        nodes = None
        rows = call.rows if call is not None else ()
        for kind, item in self.found.result:
            if kind is LeafKind.ARRAY:
                merged.append(self._merge(item, results[item], rows))
            elif kind is LeafKind.ARGUMENT:
                assert call is not None, "`needs_call` is true"
                merged.append(call.leaves()[item])
            elif kind is LeafKind.OBJECT:
                assert call is not None and call.binding is not None, "it has the object"  # noqa: PT018
                nodes = nodes or nnx_contents.nodes_of(call.binding.objects())
                merged.append(nodes[item])
            else:
                merged.append(item)
        return self.found.treedef.unflatten(merged)

    @phases.measure(Phase.ROWS)
    def check_rows(self, call: RunCall, *, is_rehearsal: bool) -> None:
        """Raises for numbers of real rows that the program does not support."""
        if self.partial is None:
            return
        if not is_rehearsal:
            self.partial.warn_of_empty(call.rows)
        self.partial.check(call.rows)

    def __post_init__(self):
        origins = {kind for kind, _ in self.found.result}
        self.needs_call = bool(origins & {LeafKind.ARGUMENT, LeafKind.OBJECT})
        self._keys = {} if self.found.treedef is None else self._find_keys()
        # Whether the arrays of the results are the leaves of the result as they are.
        outputs = [(LeafKind.ARRAY, i) for i in range(self.found.num_results)]
        self.are_leaves = (
            self.partial is None
            and self.found.result == outputs
            and bool(self.stack_outputs)
            and not any(self.stack_outputs[: self.found.num_results])
        )

    def _find_keys(self) -> dict[int, str]:
        """Returns by output the innermost dict key under which the function returned it."""
        # Results in containers that JAX cannot flatten have none.
        result = self.found.result
        tree = self.found.treedef.unflatten(range(len(result)))
        found_keys = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            keys = [x.key for x in path if isinstance(x, jax.tree_util.DictKey)]
            if isinstance(leaf, int) and keys and isinstance(keys[-1], str):
                kind, output = result[leaf]
                if kind is LeafKind.ARRAY:
                    found_keys[output] = keys[-1]
        return found_keys

    def _merge(
        self, i: int, array: jax.Array, rows: Sequence[tuple[int, ...]]
    ) -> jax.Array | PerReplica:
        extents = self.partial.extents(i, rows) if self.partial is not None else []
        if not self.stack_outputs[i]:
            # It has the rows of all replicas, gathered, or no rows: the same on each replica.
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
    """Returns `outputs`, those in `aggregated` combined over replicas; in the trace of a program.

    All outputs of one reduction travel together.
    """
    outputs = list(outputs)
    for op, indices in aggregated.items():
        values = [outputs[i] for i in indices]
        if op is None:
            combined = collectives.broadcast(values)
        else:
            combined = cross_device_ops.all_reduce(op, values)
        for i, x in zip(indices, combined, strict=True):
            outputs[i] = x.astype(outputs[i].dtype)
    return outputs
