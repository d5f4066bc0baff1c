"""The context of a replica function, `tpudist.get_replica_context()`, with its collectives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context.frame import Frame
from tpudist.context.strategy_base import StrategyBase
from tpudist.options import warn_of_deprecation
from tpudist.reduce_op import ReduceOp
from tpudist.reductions import cross_device_ops
from tpudist.values import indexed_slices
from tpudist.values.indexed_slices import is_slices
from tpudist.values.per_replica import LocalPart, PerReplica, is_distributed
from tpudist.xla import (
    collectives,
    communication_options,
    integers,
    random_keys,
    traces,
    tree_depth,
)
from tpudist.xla.communication_options import CommunicationOptions


class ReplicaContext:
    """The view of one replica, inside a function that `Strategy.run` runs on all of them.

    It is valid only while it is the current one: its methods raise after the function has ended.
    Strategies create it. Matches `tf.distribute.ReplicaContext`.

    Args:
        strategy: The strategy that runs the function.
        replica_id_in_sync_group: Number of the replica; None in a trace, where it is computed.
        frame: The trace it belongs to; None for the default context.
    """

    def __init__(
        self,
        strategy: StrategyBase,
        replica_id_in_sync_group: int | jax.Array | None = None,
        *,
        frame: Frame | None = None,
    ):
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self._frame = frame

    @property
    def strategy(self) -> Any:
        """The strategy that runs the function."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that run the function together."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices of all replicas, in their order; deprecated.

        One program is traced for all replicas, so the device of this replica is not known.
        Matches `tf.distribute.ReplicaContext.devices`.
        """
        warn_of_deprecation("ReplicaContext.devices", "avoid relying on devices")
        self._check_current("devices")
        return tuple(self._strategy.mesh.devices.flat)

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's number, an int32 scalar from 0 to `num_replicas_in_sync` - 1."""
        self._check_current("replica_id_in_sync_group")
        return collectives.replica_id() if self._frame is not None else self._replica_id

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, options: CommunicationOptions | None = None
    ) -> PyTree:
        """Combines `value` over all replicas; every replica gets the same result.

        Args:
            reduce_op: `SUM`, `MEAN`, `MIN` or `MAX`. `MEAN` divides by the number of replicas, not
                of examples: where replicas may hold unequal numbers of examples, sum the values and
                the counts and divide.
            value: Pytree of arrays `[...]`, of the same shapes in every replica. A value that is
                equal on n replicas counts n times in a `SUM`. The rows of
                `IndexedSlices` of all replicas are concatenated.
            options: `tpudist.experimental.CommunicationOptions`, which set the number of bytes per
                collective.

        Returns:
            Pytree of the same shapes, equal in every replica. Dtypes do not change, except that the
            `MEAN` of integers is float32.

        Raises:
            RuntimeError: If the context is not the current one.

        Differentiable for `SUM` and `MEAN`: the gradient is the same reduction of the upstream
        gradients. Cost: each of n replicas sends 2 (n - 1) / n times the bytes of `value`, if XLA
        chooses a ring. Matches `tf.distribute.ReplicaContext.all_reduce`.
        """
        op = ReduceOp.parse(reduce_op)
        self._check_current("all_reduce")
        options = self._check_options(options, "all_reduce(options")
        _check_host_values(value, "all_reduce")
        if self._frame is None:
            return jax.tree.map(
                lambda x: x if is_slices(x) else jnp.asarray(collectives.widen_for_mean(op, x)),
                value,
                is_leaf=is_slices,
            )
        return indexed_slices.all_reduce(
            op, value, lambda op, dense: cross_device_ops.all_reduce(op, dense, options)
        )

    def all_gather(
        self, value: PyTree, axis: int, options: CommunicationOptions | None = None
    ) -> PyTree:
        """Concatenates the replicas' values along dim `axis`; every replica gets the result.

        Args:
            value: Pytree of arrays `[...]` with at least one dim, of the same shapes on all
                replicas.
            axis: The dim, which may be negative.
            options: Same as in `all_reduce`.

        Raises:
            RuntimeError: If the context is not the current one.
            ValueError: If a leaf has no such dim, or `options` has another type.

        Differentiable: each replica gets its own part of the sum of the upstream gradients.
        Matches `tf.distribute.ReplicaContext.all_gather`.
        """
        self._check_current("all_gather")
        options = self._check_options(options, "all_gather(options")
        indexed_slices.refuse_slices(value, "all_gather")
        _check_host_values(value, "all_gather")
        if self._frame is None:
            return jax.tree.map(jnp.asarray, value)
        return cross_device_ops.all_gather(value, axis, options)

    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> PyTree:
        """Calls `merge_fn(strategy, *args, **kwargs)` once, in cross-replica context.

        Arrays among the arguments become PerReplicas. Combine them with `strategy.reduce` or
        `strategy.extended.reduce_to`; everything is part of the same compiled program. Each replica
        gets its own part of the result.

        Args:
            merge_fn: Called with the strategy, `args` and `kwargs`; returns a pytree.
            args: Positional arguments of this replica.
            kwargs: Keyword arguments of this replica.

        Raises:
            RuntimeError: If the context is not the current one.

        Matches `tf.distribute.ReplicaContext.merge_call`.
        """
        self._check_current("merge_call")
        kwargs = dict(kwargs or {})
        if self._frame is None:
            with context.enter(context.Mode(context.ContextKind.SCOPE, self._strategy)):
                return merge_fn(self._strategy, *args, **kwargs)
        if self._frame.is_eager:
            return self._frame.call_merged(merge_fn, args, kwargs)
        args = jax.tree.map(self._to_merge_argument, tuple(args), is_leaf=is_distributed)
        kwargs = {
            name: jax.tree.map(self._to_merge_argument, value, is_leaf=is_distributed)
            for name, value in kwargs.items()
        }
        mode = context.Mode(context.ContextKind.MERGE, self._strategy, frame=self._frame)
        with context.enter(mode):
            result = merge_fn(self._strategy, *args, **kwargs)
        return jax.tree.map(
            lambda x: x.array if isinstance(x, LocalPart) else x,
            result,
            is_leaf=is_distributed,
        )

    def _check_options(
        self, options: CommunicationOptions | None, place: str
    ) -> CommunicationOptions | None:
        return communication_options.check_options(
            options, place, self._strategy.replica_mesh.platform
        )

    def _to_merge_argument(self, x: Any) -> Any:
        """Returns an argument that is the same on all replicas unchanged, or else a LocalPart."""
        if self.num_replicas_in_sync == 1:
            return jnp.asarray(x) if isinstance(x, PerReplica) else x
        if isinstance(x, PerReplica):
            return LocalPart(jnp.asarray(x))
        assert self._frame is not None, "outside of traces nothing is wrapped"
        same = not traces.is_traced(x) or self._frame.is_same_everywhere(x)
        return x if same else LocalPart(x)

    def example_mask(self, batch: jax.Array) -> jax.Array:
        """Returns a mask of the real rows of a batch: the replica function sees only real rows.

        The padding of a partial batch is invisible. All that the function computes, such as sums
        and means, counts real rows only, with this mask or without.

        Args:
            batch: Any array `[rows, ...]` with examples in dim 0.

        Returns:
            bool `[rows]`, all True.
        """
        self._check_current("example_mask")
        return jnp.ones((batch.shape[0],), bool)

    def num_examples(self, batch: jax.Array) -> int | jax.Array:
        """Returns the number of rows of the batch on all replicas, an int or an int32 scalar.

        Rows of all microbatches count, if the batch is computed in several.

        Args:
            batch: Any array `[rows, ...]` with this replica's examples in dim 0.
        """
        self._check_current("num_examples")
        rows, frame = batch.shape[0], self._frame
        parts = context.num_parts()
        if frame is None or not frame.has_partial_batch:
            return rows * self.num_replicas_in_sync * parts
        if parts > 1:
            whole = frame.whole_of_parts(parts, rows)
            assert whole is not None, "it has a partial batch"
            rows = whole
        return collectives.all_reduce(ReduceOp.SUM, jnp.asarray(rows, jnp.int32))

    def random_key(self, key: jax.Array | int) -> jax.Array:
        """Returns a random key for this replica, derived from a key that all replicas share.

        Args:
            key: A key, an array of keys, or an int as seed; use a new one at each step.
        """
        self._check_current("random_key")
        if isinstance(key, int):
            key = jax.random.key(key)
        return random_keys.fold_in(key, self.replica_id_in_sync_group)

    def _check_current(self, method: str) -> None:
        mode = context.current()
        if mode.replica_context is self:
            return
        if mode.strategy is not self._strategy and mode.strategy is not None:
            found = f"the current strategy is {mode.strategy!r}, not {self._strategy!r}"
        elif mode.replica_context is None:
            found = "the current context is cross-replica"
        else:
            found = "another replica function is running"
        raise RuntimeError(
            f"{method} was called on a ReplicaContext that is not the current one: {found}. A "
            "context is valid only inside the call of the replica function that received it. Call "
            "tpudist.get_replica_context() again where you need it."
        )


def _check_host_values(value: PyTree, method: str) -> None:
    """Raises for trees that are too deep for JAX, and NumPy values that JAX would truncate."""
    tree_depth.check_depth(value, f"A value given to {method}")
    for x in jax.tree.leaves(value):
        integers.check_fit(x, f"A value given to {method}")
