"""The body of a trace: calls the function as one replica, on flat inputs.

NNX objects are copied around traced values, random streams are folded with the replica's number,
and sums over examples start from zero on all replicas except the first.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context import ContextKind
from tpudist.reduce_op import VariableAggregation
from tpudist.run.arguments import call_arguments
from tpudist.run.arguments.containers import unpack
from tpudist.run.frame.trace_frame import ReplicaFrame
from tpudist.run.frame.trace_requests import TraceAgain
from tpudist.run.frame.traced_rows import TracedRows
from tpudist.run.outputs.results import CallOutputs, LeafKind, ResultLeaf
from tpudist.run.replica_call import ReplicaCall
from tpudist.run.replica_context import ReplicaContext
from tpudist.state import nnx_captures, nnx_contents, norm_statistics
from tpudist.state.nnx_binding import Binding
from tpudist.state.variable import Variable
from tpudist.values.per_replica import (
    LocalPart,
    PerReplica,
    is_distributed,
    is_per_replica,
    open_parts,
)
from tpudist.xla import collectives, random_keys, traces, tree_depth
from tpudist.xla.array_attributes import has_dtype
from tpudist.xla.mesh import REPLICA_AXIS

_SUM = VariableAggregation.SUM


class ReplicaBody:
    """Calls the function of a call as one replica.

    Args:
        variables: The Variables and captured PerReplicas that are the first inputs.
    """

    def __init__(self, call: ReplicaCall, variables: Sequence[Any]):
        self.call, self.variables = call, variables

    def make_flat_function(
        self, found: CallOutputs, rows: TracedRows | None = None, changed: Collection[int] = ()
    ) -> Callable[..., list[Any]]:
        """Returns the function from flat local inputs to flat outputs.

        Args:
            found: Receives the description of the outputs when the function is called.
            rows: Numbers of rows in this trace, if some batch is partial.
            changed: NNX leaves that are outputs even if the function returns them unchanged. For no
                rows JAX may drop an update, but all traces must have the same outputs.
        """

        def flat(*local: Any) -> list[Any]:
            # The outputs are in the order of `CallOutputs`: results, Variables, NNX arrays, initial
            # values.
            first = local[: len(self.variables)]
            nnx_values, arguments = self.call.inputs.split(local[len(self.variables) :])
            frame = self._make_frame(dict(zip(self.variables, first, strict=True)), rows)
            # After the arguments, `stacked` has the numbers of rows.
            parts = self.call.inputs.stacked[self.call.inputs.num_nnx :]
            frame.same = {id(x): x for x, part in zip(arguments, parts, strict=False) if not part}
            copies, first_values = self._copy_objects(nnx_values)
            result = self._call_function(frame, found, arguments, copies)
            found.computed = [v for v, value in frame.made.items() if value is not None]
            found.incomplete = frame.incomplete
            initial_values = [frame.made[v] for v in found.computed]
            if frame.incomplete:
                # The function is traced again, but the Variables that it created start here.
                return initial_values
            found.references = frame.references.variables
            outputs = self._collect_results(found, result, arguments, copies, rows is not None)
            found.read, found.variables = frame.read, list(frame.written)
            outputs += [frame.value_of(v) for v in frame.written]
            outputs += self._collect_changes(found, copies, first_values, changed)
            return outputs + initial_values  # of Variables that a nested `run` has created

        return flat

    def _make_frame(self, values: dict[Any, Any], rows: TracedRows | None) -> ReplicaFrame:
        call = self.call
        if call.strategy.num_replicas_in_sync > 1 and not call.whole:
            for v in self.variables:
                if v.is_counted:
                    values[v] = share_of_replica(values[v])
        return ReplicaFrame(
            call.strategy, values, call.findings, call.fn, call.outer, rows, call.whole
        )

    def _call_function(
        self, frame: ReplicaFrame, found: CallOutputs, arguments: list[Any], copies: tuple
    ) -> PyTree:
        call = self.call
        flat_arguments = call.inputs.flat_arguments(
            call.leaves, self._wrap_arguments(arguments), call.kinds, copies
        )
        args, kwargs = call_arguments.unflatten(flat_arguments, call.structure, call.num_args)
        if call.whole:
            for x in jax.tree.leaves((args, kwargs), is_leaf=is_distributed):
                if isinstance(x, LocalPart):
                    frame.note_part(x)
        try:
            explained = nnx_captures.explain_captures(call.name, call.whole)
            weighed = norm_statistics.weigh_by_rows(
                self._names_of_replica_axes() if frame.has_partial_batch else ()
            )
            with context.enter(self._mode(frame)), frame.enter(), explained, weighed:
                result = call.fn(*args, **kwargs)
            if frame.missed_assignment:
                raise TraceAgain
        except TraceAgain as interruption:
            if not frame.made:
                raise
            # The Variables that were created so far must start first: their values are outputs.
            frame.incomplete, found.interruption, result = True, interruption, None
        return result

    def _names_of_replica_axes(self) -> list[str]:
        mesh = self.call.strategy.replica_mesh
        return [x for x in (REPLICA_AXIS, mesh.axis_name) if x is not None]

    def _mode(self, frame: ReplicaFrame) -> context.Mode:
        strategy, whole = self.call.strategy, self.call.whole
        # Outside of all scopes, code runs in the replica context of the default strategy.
        if whole and strategy is not context.default_mode().strategy:
            return context.Mode(ContextKind.FUNCTION, strategy, frame=frame)
        kind = ContextKind.FUNCTION if whole else ContextKind.REPLICA
        return context.Mode(kind, strategy, ReplicaContext(strategy, frame=frame), frame)

    def _wrap_arguments(self, arguments: list[Any]) -> list[Any]:
        """Returns the argument arrays as the function receives them."""
        return self._wrap(arguments, self.call.inputs.stacked[self.call.inputs.num_nnx :])

    def _wrap(self, arrays: list[Any], stacked: Sequence[bool]) -> list[Any]:
        if not self.call.whole or self.call.strategy.num_replicas_in_sync == 1:
            return arrays
        pairs = zip(arrays, stacked, strict=False)
        return [LocalPart(x) if is_part else x for x, is_part in pairs]

    def _copy_objects(self, nnx_values: list[Any]) -> tuple[tuple, list[Any]]:
        """Returns copies of the NNX objects around traced values, and their first values."""
        call, inputs, binding = self.call, self.call.inputs, self.call.binding
        if binding is None:
            return (), []
        values = inputs.nnx_structure.unflatten(nnx_values)
        strategy = call.strategy
        # A verification compares one device, the stand-in, with several replicas. The device draws
        # the random numbers of the first replica, whose keys are folded.
        has_own_keys = strategy.num_replicas_in_sync > 1 or strategy._stand_in is not None
        parts = inputs.parts_of_objects
        if has_own_keys and not call.whole:
            stacked = {i for i, _ in parts}
            values = make_values_of_replica(
                binding, values, stacked, dict(call.rules), call.not_sums
            )
        if call.whole and parts:
            flat = self._wrap(jax.tree.leaves(values), inputs.stacked[: inputs.num_nnx])
            values = inputs.nnx_structure.unflatten(flat)
        return binding.copy_with(values), values

    def _collect_results(
        self,
        found: CallOutputs,
        result: PyTree,
        arguments: list[Any],
        copies: tuple,
        partial: bool,
    ) -> list[Any]:
        """Returns the arrays of the result, and describes all of its leaves in `found`."""
        inputs = self.call.inputs
        positions = {id(x): i for i, x in enumerate(nnx_contents.nodes_of(copies))}
        # The array of a donated argument is deleted: if returned, it is a new array.
        others = self.call.donated_leaves.union(dict(inputs.state_structures))
        of_argument = {
            id(x): leaf
            for x, leaf in zip(arguments, inputs.leaves_of_arguments, strict=True)
            if leaf not in others
        }

        def is_leaf(x):
            return id(x) in positions or isinstance(x, PerReplica | Variable)

        tree_depth.check_depth(result, f"The result of '{self.call.name}'", is_leaf)
        result = unpack(result, is_leaf)
        leaves, found.treedef = jax.tree.flatten(result, is_leaf=is_leaf)
        outputs = []
        if partial:
            # For few rows JAX may return an argument or a constant where it computes a value
            # otherwise. All traces must have the same outputs, so each array is one.
            of_argument = {}
        for x in leaves:
            if isinstance(x, PerReplica) and traces.is_traced(x.array):
                x = x.array
            if id(x) in positions:
                found.result.append(ResultLeaf(LeafKind.OBJECT, positions[id(x)]))
            elif id(x) in of_argument:
                found.result.append(ResultLeaf(LeafKind.ARGUMENT, of_argument[id(x)]))
            elif traces.is_traced(x) or (partial and isinstance(x, jax.Array)):
                found.result.append(ResultLeaf(LeafKind.ARRAY, len(outputs)))
                outputs.append(x)
            else:
                found.result.append(ResultLeaf(LeafKind.VALUE, x))
        found.num_results = len(outputs)
        return outputs

    def _collect_changes(
        self, found: CallOutputs, copies: tuple, first_values: list[Any], changed: Collection[int]
    ) -> list[Any]:
        """Returns the NNX arrays that the function has replaced, and describes them in `found`."""
        binding, inputs = self.call.binding, self.call.inputs
        if binding is None:
            return []
        values = binding.values_of(copies)
        if values is not None:
            flags = open_parts(values)[1]
            pairs = zip(inputs.arrays_of_objects, flags, strict=False)
            found.local = {leaf_and_array for leaf_and_array, is_part in pairs if is_part}
            values = jax.tree.map(_array_of, values, is_leaf=is_per_replica)
        if values is None or jax.tree.structure(values) != inputs.nnx_structure:
            found.structure_change = binding.describe_changes(copies)
            return []
        outputs = []
        for i, (new, old) in enumerate(zip(values, first_values, strict=True)):
            olds = jax.tree.leaves(jax.tree.map(_array_of, old, is_leaf=is_per_replica))
            pairs = list(zip(jax.tree.leaves(new), olds, strict=True))
            if i not in changed and all(x is y for x, y in pairs):
                continue
            if binding.variables[i] is None:  # an array without a Variable to write it back to
                found.structure_change = f"the array '{binding.name(i)}' was replaced"
            for j, (x, y) in enumerate(pairs):
                found.nnx.append((i, j))
                # The user may assign anything: arrays keep their dtype, Python numbers have none.
                outputs.append(x if has_dtype(x) else jnp.asarray(x, y.dtype))
        return outputs


def _array_of(x: object) -> object:
    return x.array if isinstance(x, PerReplica) else x


def make_values_of_replica(
    binding: Binding,
    values: Sequence[PyTree],
    parts: Collection[int],
    rules: Mapping[str, str],
    not_sums: Collection[int] = (),
) -> list[PyTree]:
    """Returns the values of NNX objects with which one of several replicas begins.

    Each replica has its own random keys. The first replica has all of a sum over examples, and the
    others zeros, so that it counts once when the replicas add up.

    Args:
        parts: Leaves that have one value per replica already, and do not change.
        rules: Aggregation of state; see `RunOptions.aggregation`.
        not_sums: Leaves of averages to which the function does more than add.
    """
    replica = collectives.replica_id()
    own = list(values)
    for i, x in enumerate(own):
        if i in parts:
            continue
        if binding.is_random_key(i):
            own[i] = random_keys.fold_in(x, replica)
        else:
            # The user's rules come before the rule of the NNX Variable.
            rule = binding.aggregation(i, rules)
            if rule is VariableAggregation.NONE:
                rule = binding.aggregation(i)  # it gets one value per replica: see `local_state`
            if rule is _SUM and i not in not_sums:
                own[i] = share_of_replica(x)
    return own


def share_of_replica(x: jax.Array) -> jax.Array:
    """Returns a replica's share of a sum: the first has all of it, so that it counts once."""
    return jnp.where(collectives.replica_id() == 0, x, jnp.zeros_like(x))
