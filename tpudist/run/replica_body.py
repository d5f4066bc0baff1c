"""The body of a trace: the function as one replica calls it, on flat inputs.

NNX objects are copied around traced values, random streams are folded with the replica's number,
sums over examples start from zero on all replicas but the first.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist import context
from tpudist.context import ContextKind
from tpudist.reduce_op import VariableAggregation
from tpudist.run.arguments import call_arguments
from tpudist.run.arguments.containers import unpack
from tpudist.run.captures import NewVariable
from tpudist.run.outputs.results import CallOutputs
from tpudist.run.replica_call import ReplicaCall
from tpudist.run.replica_context import ReplicaContext
from tpudist.run.trace_frame import ReplicaFrame
from tpudist.run.traced_rows import TracedRows
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
from tpudist.xla.mesh import REPLICA_AXIS

_SUM = VariableAggregation.SUM


class ReplicaBody:
    """Calls the function as one replica."""

    def __init__(self, call: ReplicaCall, variables: Sequence[Any]):
        """For one kind of call.

        Args:
            call: The call.
            variables: The Variables and captured PerReplicas that are the first inputs.
        """
        self.call, self.variables = call, variables

    def make_flat_function(
        self, found: CallOutputs, rows: TracedRows | None = None, changed: Collection[int] = ()
    ) -> Callable[..., list[Any]]:
        """The function of flat local inputs that gives flat outputs.

        Args:
            found: Takes what the call gives besides outputs.
            rows: Of partial batches: how many rows this trace has.
            changed: The NNX leaves that are outputs even if the function gives them back as they
                were: for no rows JAX leaves an update out.
        """

        call, inputs = self.call, self.call.inputs

        def flat(*local):
            count = len(self.variables)
            nnx_values, arguments = inputs.split(local[count:])
            frame = ReplicaFrame(
                call.strategy,
                self._begin_counts(dict(zip(self.variables, local[:count], strict=True))),
                call.findings,
                call.fn,
                call.outer,
                rows,
            )
            frame.whole = call.whole
            parts = inputs.stacked[inputs.num_nnx :]
            frame.same = {id(x): x for x, part in zip(arguments, parts, strict=False) if not part}
            copies, entered = self._enter_objects(nnx_values)
            flat_arguments = inputs.flat_arguments(
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
                    self._names_of_replicas() if frame.has_partial_batch else ()
                )
                with context.enter(self._mode(frame)), frame.enter(), explained, weighed:
                    result = call.fn(*args, **kwargs)
                if frame.missed_assignment:
                    raise NewVariable
            except NewVariable as interruption:
                if not frame.made:
                    raise
                frame.incomplete, found.interruption, result = True, interruption, None
            found.computed = [v for v, value in frame.made.items() if value is not None]
            found.incomplete = frame.incomplete
            initial_values = [frame.made[v] for v in found.computed]
            if frame.incomplete:
                return initial_values
            found.references = frame.references.variables
            outputs = self._collect_results(found, result, arguments, copies, rows is not None)
            found.read, found.variables = frame.read, list(frame.written)
            outputs += [frame.value_of(v) for v in frame.written]
            outputs += self._collect_changes(found, copies, entered, changed)
            return outputs + initial_values  # of what is made in a nested `run`

        return flat

    def _names_of_replicas(self) -> list[str]:
        mesh = self.call.strategy.replica_mesh
        return [x for x in (REPLICA_AXIS, mesh.axis_name) if x is not None]

    def _begin_counts(self, values: dict[Any, Any]) -> dict[Any, Any]:
        if self.call.strategy.num_replicas_in_sync > 1 and not self.call.whole:
            for v in self.variables:
                if getattr(v, "is_counted", False):
                    values[v] = share_of_replica(values[v])
        return values

    def _mode(self, frame: ReplicaFrame) -> context.Mode:
        strategy, whole = self.call.strategy, self.call.whole
        # Out of all scopes one is in replica context, that of the default strategy.
        if whole and strategy is not context.default_mode().strategy:
            return context.Mode(ContextKind.FUNCTION, strategy, frame=frame)
        kind = ContextKind.FUNCTION if whole else ContextKind.REPLICA
        return context.Mode(kind, strategy, ReplicaContext(strategy, frame=frame), frame)

    def _wrap_arguments(self, arguments: list[Any]) -> list[Any]:
        """What the function gets for the arrays among its arguments."""
        return self._wrap(arguments, self.call.inputs.stacked[self.call.inputs.num_nnx :])

    def _wrap(self, arrays: list[Any], stacked: Sequence[bool]) -> list[Any]:
        if not self.call.whole or self.call.strategy.num_replicas_in_sync == 1:
            return arrays
        pairs = zip(arrays, stacked, strict=False)
        return [LocalPart(x) if is_part else x for x, is_part in pairs]

    def _enter_objects(self, nnx_values: list[Any]) -> tuple[tuple, list[Any]]:
        binding = self.call.binding
        if binding is None:
            return (), []
        values = self.call.inputs.nnx_structure.unflatten(nnx_values)
        strategy = self.call.strategy
        # One device that several replicas are compared with draws the numbers of the first one.
        several = strategy.num_replicas_in_sync > 1 or strategy._stand_in is not None
        parts = self.call.inputs.parts_of_objects
        if several and not self.call.whole:
            own = {i for i, _ in parts}
            values = make_values_of_replica(
                binding, values, own, dict(self.call.rules), self.call.not_sums
            )
        if self.call.whole and parts:
            stacked = self.call.inputs.stacked[: self.call.inputs.num_nnx]
            flat = self._wrap(jax.tree.leaves(values), stacked)
            values = self.call.inputs.nnx_structure.unflatten(flat)
        return binding.copy_with(values), values

    def _collect_results(
        self,
        found: CallOutputs,
        result: Any,
        arguments: list[Any],
        copies: tuple,
        partial: bool,
    ) -> list[Any]:
        inputs = self.call.inputs
        positions = {id(x): i for i, x in enumerate(nnx_contents.nodes_of(copies))}
        of_argument = {
            id(x): leaf
            for x, leaf in zip(arguments, inputs.leaves_of_arguments, strict=True)
            # A donated argument is gone afterwards: it is returned as a new array.
            if leaf not in dict(inputs.state_structures) and leaf not in self.call.donated_leaves
        }

        def is_leaf(x):
            return id(x) in positions or isinstance(x, PerReplica | Variable)

        tree_depth.check_depth(result, f"The result of '{self.call.name}'", is_leaf)
        result, has_records = unpack(result, is_leaf)
        found.plain = not has_records
        leaves, found.treedef = jax.tree.flatten(result, is_leaf=is_leaf)
        outputs = []
        if partial:  # of few rows JAX may give back what it was given, or a constant
            of_argument = {}
        for x in leaves:
            if isinstance(x, PerReplica) and traces.is_traced(x.array):
                x = x.array
            if id(x) in positions:
                found.result.append(("object", positions[id(x)]))
            elif id(x) in of_argument:
                found.result.append(("argument", of_argument[id(x)]))
            elif traces.is_traced(x) or (partial and isinstance(x, jax.Array)):
                found.result.append(("array", len(outputs)))
                outputs.append(x)
            else:
                found.result.append(("itself", x))
        found.num_results = len(outputs)
        return outputs

    def _collect_changes(
        self, found: CallOutputs, copies: tuple, entered: list[Any], changed: Collection[int]
    ) -> list[Any]:
        binding, inputs = self.call.binding, self.call.inputs
        if binding is None:
            return []
        values = binding.values_of(copies)
        if values is not None:
            flags = open_parts(values)[1]
            found.local = {
                at for at, part in zip(inputs.arrays_of_objects, flags, strict=False) if part
            }
            values = jax.tree.map(_take_part, values, is_leaf=is_per_replica)
        if values is None or jax.tree.structure(values) != inputs.nnx_structure:
            found.structure_change = binding.describe_changes(copies)
            return []
        outputs = []
        for i, (new, old) in enumerate(zip(values, entered, strict=True)):
            olds = jax.tree.leaves(jax.tree.map(_take_part, old, is_leaf=is_per_replica))
            pairs = list(zip(jax.tree.leaves(new), olds, strict=True))
            if i not in changed and all(x is y for x, y in pairs):
                continue
            if binding.variables[i] is None:
                # It has no Variable to write back to.
                found.structure_change = f"the array '{binding.name(i)}' was replaced"
            for j, (x, y) in enumerate(pairs):
                found.nnx.append((i, j))
                outputs.append(x if hasattr(x, "dtype") else jnp.asarray(x, y.dtype))
        return outputs


def _take_part(x: Any) -> Any:
    return x.array if isinstance(x, PerReplica) else x


def make_values_of_replica(
    binding: Binding,
    values: Sequence[Any],
    parts: Collection[int],
    rules: Mapping[str, str],
    not_sums: Collection[int] = (),
) -> list[Any]:
    """The values of NNX objects as one of several replicas begins with them.

    Random keys are its own; of a sum over examples the first replica has all that there was. What
    is one of its own already (`parts`) stays.
    """
    me = collectives.replica_id()
    own = list(values)
    for i, x in enumerate(own):
        if i in parts:
            continue
        if binding.is_random_key(i):
            own[i] = random_keys.fold_in(x, me)
        else:
            rule = binding.aggregation(i, rules)
            if rule is VariableAggregation.NONE:
                rule = binding.aggregation(i)  # local from now on: see `local_state`
            if rule is _SUM and i not in not_sums:
                own[i] = share_of_replica(x)
    return own


def share_of_replica(x: Any) -> jax.Array:
    """Returns a replica's share of a sum: the first has all of it, so that it counts once."""
    return jnp.where(collectives.replica_id() == 0, x, jnp.zeros_like(x))
