"""The methods of `Strategy` that combine the values of replicas, split them up or create them."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.lowering import replica_parts
from tpudist.options import ValueContext
from tpudist.reduce_op import ReduceOp
from tpudist.reductions import gather, reduce
from tpudist.run.step_cache import Replicator
from tpudist.state.variable import Variable
from tpudist.values import stacked_values
from tpudist.values.indexed_slices import is_slices
from tpudist.values.per_replica import PerReplica
from tpudist.xla import integers, traces, tree_depth
from tpudist.xla.communication_options import CommunicationOptions


class ReductionMethods(StrategyBase):
    """Reduces, gathers and reads values of replicas; a part of `Strategy`."""

    _replicator: Replicator

    def reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, axis: int | tuple[int, ...] | None
    ) -> PyTree:
        """Combines `value` over replicas, and over dims of each replica's part if you pass `axis`.

        Args:
            reduce_op: `SUM`, `MEAN`, `MIN` or `MAX`.
            value: Pytree of PerReplica, or of values that are equal everywhere. Equal values count
                n times in a `SUM` over n replicas.
            axis: None to combine elementwise over replicas. A dim (or a tuple of dims), usually dim
                0 of the examples, to combine over it as well: `MEAN` then divides by the true
                number of elements, so partial batches are exact.

        Returns:
            Pytree of arrays that every replica holds.

        Raises:
            RuntimeError: If called in a replica function, or in the scope of another strategy.
            ValueError: If the op is unknown, the dim does not exist, or the parts have unequal
                shapes and no axis is given.

        Matches `tf.distribute.Strategy.reduce`, which raises an error for the `SUM` of a plain
        value.
        """
        acting: Any = context.resolve_twin(self)
        context.require_scope_or_default(acting, "reduce")
        op = ReduceOp.parse(reduce_op)
        return acting._map(lambda x: reduce.reduce(acting, op, x, axis), value)

    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenates the replicas' parts along dim `axis`, in replica order, without padding.

        A value that replicas computed appears once for each replica, even if it is equal on all. A
        plain value, such as a NumPy array or an array on one device, is returned unchanged.

        Raises:
            RuntimeError: If called in a replica function, or in the scope of another strategy.
            ValueError: If the parts have no such dim. Also if a `tpudist.function` passes one of
                its plain arguments, or a value that it computes from arrays itself: it is then
                unknown whether the value counts once, or once for each replica.

        Matches `tf.distribute.Strategy.gather`, which treats the results of `reduce` and `gather`
        as plain values; here every array that all replicas hold counts n times. Negative axes
        work.
        """
        acting: Any = context.resolve_twin(self)
        context.require_scope_or_default(acting, "gather")
        return acting._map(lambda x: gather.gather(acting.replica_mesh, x, axis), value)

    def _reduce_together(
        self, reduce_op: ReduceOp | str, value: PyTree, options: CommunicationOptions | None
    ) -> PyTree:
        """Reduces all leaves like `reduce` with axis=None, in as few collectives as possible."""
        context.require_scope_or_default(self, "reduce")
        op = ReduceOp.parse(reduce_op)
        return self._map_all(lambda xs: reduce.reduce_all(self, op, xs, options), value)

    def _map(self, function: Callable[[Any], Any], value: PyTree) -> PyTree:
        return self._map_all(lambda xs: [function(x) for x in xs], value)

    def _map_all(self, function: Callable[[list[Any]], list[Any]], value: PyTree) -> PyTree:
        frame = context.current().frame
        tree_depth.check_depth(value, "A value to be reduced or gathered")

        def note_equal(x: Any) -> Any:
            # In a trace, the frame remembers the values that are equal on every replica: `gather`
            # and local results must count them once for each replica.
            if frame is not None and not isinstance(x, PerReplica):
                frame.note_equal_result(x)
            return x

        def read(x: Any) -> Any:
            if not isinstance(x, Variable):
                return x
            if x.on_read:
                return PerReplica(x._value) if frame is None else x.local_part()
            return note_equal(x.read_value())

        # JAX refuses to set a mesh while it traces.
        with self._use_mesh() if traces.is_eager() else contextlib.nullcontext():
            leaves, treedef = jax.tree.flatten(value, is_leaf=_is_value)
            arrays = [x.array if isinstance(x, PerReplica) else x for x in leaves]
            for x in leaves:
                integers.check_fit(x, "A value to be reduced or gathered")
            # A reduction counts as a step of the throttle, so that a loop of reductions does not
            # run arbitrarily far ahead of the devices.
            self._replicator.throttle.before_step(arrays)
            results = function([read(x) for x in leaves])
        if computed := jax.tree.leaves(results):
            self._replicator.throttle.after_step(computed[0])  # one result is enough to wait for
        for x in results:
            note_equal(x)
        return treedef.unflatten(results)

    def experimental_local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Returns the parts of this process's replicas, in order; `(value,)` for a plain value.

        A value that replicas computed has one part for each replica, even if it is equal on all.
        For a Variable, the parts are its components, `Variable.values`. For a tree, they are one
        tree for each replica. All parts are on the devices of this process's first replica, so that
        you can add them.

        Raises:
            ValueError: If a `tpudist.function` passes a plain value that it computes; see `gather`.

        Matches `tf.distribute.Strategy.experimental_local_results`, which treats the results of
        `reduce` and `gather` as plain values; here every array that all replicas hold has one part
        for each replica.
        """
        mesh = self.replica_mesh
        n = len(mesh.local_replicas)
        in_trace = context.current().frame is not None
        if isinstance(value, Variable) and not in_trace:
            return value.values
        tree_depth.check_depth(value, "A value whose local results are wanted", _is_value)
        leaves, treedef = jax.tree.flatten(value, is_leaf=_is_value)
        has_parts = any(isinstance(x, PerReplica) for x in leaves)
        # With one replica nothing was stacked, unless a PerReplica was created explicitly.
        if not leaves or (self.num_replicas_in_sync == 1 and not has_parts):
            return (value,)
        is_plain = not isinstance(leaves[0], PerReplica | Variable)
        # A single plain value, not a tree. It has one part per replica only if replicas have
        # computed it; a NumPy array of the user counts once, as in tf.distribute.
        if jax.tree_util.treedef_is_leaf(treedef) and is_plain:
            return (value,) * (n if gather.is_on_every_replica(mesh, value) else 1)

        def local(x: Any) -> Any:
            if isinstance(x, Variable) and self.variables_have_components:
                if not in_trace:
                    return x.values
                x = x.local_part() if x.on_read else x.read_value()
            if not isinstance(x, PerReplica):
                # In a tree with PerReplicas all parts must be on one device, so that they can be
                # added.
                return (replica_parts.copy_of_first_replica(mesh, x) if has_parts else x,) * n
            parts = gather.local_parts(mesh, x)
            return tuple(replica_parts.move_part(mesh, part) for part in parts)

        parts = [local(x) for x in leaves]
        return tuple(treedef.unflatten([p[i] for p in parts]) for i in range(n))

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], PyTree]
    ) -> PyTree:
        """Returns a PerReplica of the results of `value_fn` for this process's replicas.

        The values of replicas may have different sizes in one dim. Every process must call this
        at the same point, because the processes exchange descriptions of their values.

        Raises:
            ValueError: If the values of replicas differ in structure, rank, or size in several
                dims.
            RuntimeError: If called in a replica function or in the scope of another strategy, or if
                `value_fn` failed in another process.

        Matches `tf.distribute.Strategy.experimental_distribute_values_from_function`.
        """
        context.require_scope_or_default(self, "experimental_distribute_values_from_function")
        n = self.num_replicas_in_sync
        if n == 1:
            return value_fn(ValueContext(0, 1))
        local = self.replica_mesh.local_replicas
        return stacked_values.stack_trees(
            self.replica_mesh, lambda: [value_fn(ValueContext(i, n)) for i in local]
        )


def _is_value(x: object) -> bool:
    return isinstance(x, PerReplica | Variable) or is_slices(x)
