"""The adapter for tpudist: what a case may use of it. Of each strategy there is one object."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tpudist
from tpudist.options import AutoShardPolicy

from . import plain, rules


class Api:
    """The functions that a case may use: the members of `on_tensorflow.Api`."""

    library = "tpudist"
    dist = tpudist
    Variable = tpudist.Variable
    VariableAggregation = tpudist.VariableAggregation
    VariableSynchronization = tpudist.VariableSynchronization
    PerReplica = tpudist.PerReplica
    sum = staticmethod(jnp.sum)
    square = staticmethod(jnp.square)
    concat = staticmethod(jnp.concatenate)
    reshape = staticmethod(jnp.reshape)

    def __init__(self) -> None:
        self.coordinators: list[tpudist.coordinator.ClusterCoordinator] = []

    @property
    def v1(self) -> Any:
        return tpudist.compat.v1

    @property
    def Mirrored(self) -> Any:
        return tpudist.Mirrored

    @property
    def ClusterSpec(self) -> Any:
        return tpudist.cluster_resolver.ClusterSpec

    @property
    def function(self) -> Any:
        return tpudist.function

    @functools.cache  # noqa: B019 - there is one Api
    def strategy(self, name: str) -> tpudist.Strategy:
        if name == rules.MIRRORED:
            return tpudist.MirroredStrategy(["cpu:0", "cpu:1"])
        if name == rules.MIRRORED_8:
            return tpudist.MirroredStrategy()
        if name == rules.ONE_DEVICE:
            return tpudist.OneDeviceStrategy("cpu:0")
        if name == rules.CENTRAL:
            return tpudist.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
        if name == rules.MULTI_WORKER:
            return tpudist.MultiWorkerMirroredStrategy()
        if name == rules.TPU:
            return tpudist.TPUStrategy(devices=["cpu:0", "cpu:1"])
        if name in (rules.SERVERS, rules.PARTS):
            cut = tpudist.experimental.partitioners.FixedShardsPartitioner(rules.NUM_PARTS)
            strategy = tpudist.ParameterServerStrategy(
                variable_partitioner=cut if name == rules.PARTS else None,
                num_workers=rules.NUM_TASKS,
                num_servers=rules.NUM_TASKS,
            )
            # It ends with the last who holds it; TensorFlow's lives as long as its strategy.
            self.coordinators.append(tpudist.coordinator.ClusterCoordinator(strategy))
            return strategy
        assert name == rules.DEFAULT
        return tpudist.get_strategy()

    def close(self) -> None:
        """Ends what runs for the strategies."""
        for coordinator in self.coordinators:
            coordinator.shutdown()

    def array(self, value: Any, dtype: str = "float32") -> jax.Array:
        return jnp.asarray(value, dtype)

    def cast(self, value: Any, dtype: str = "float32") -> jax.Array:
        return jnp.asarray(value, dtype)

    def ones(self, shape: Any) -> jax.Array:
        return jnp.ones(shape)

    def shape(self, *dims: int) -> tuple[int, ...]:
        return dims

    def dtype(self, name: str) -> np.dtype:
        return jnp.dtype(name)

    def grad(self, function: Callable[..., Any], *at: Any) -> Any:
        """The gradients of the sum of what `function` gives."""
        at = [jnp.asarray(x) for x in at]
        gradients = jax.grad(lambda xs: function(*xs).sum())(at)
        return gradients[0] if len(at) == 1 else tuple(gradients)

    def repeat(self, num_times: int, body: Callable[[Any], Any], start: Any) -> Any:
        """`body` applied several times, by a loop that is part of the program."""
        return jax.lax.fori_loop(0, num_times, lambda _, x: body(x), start)

    def dataset(
        self, arrays: Any, batch: int, drop_remainder: bool = False, sharded: bool = False
    ) -> tpudist.NumpyDataset:
        """A batched dataset; `sharded` by the default policy."""
        dataset = tpudist.NumpyDataset(arrays).batch(batch, drop_remainder=drop_remainder)
        if not sharded:
            dataset.auto_shard_policy = AutoShardPolicy.OFF
        return dataset

    def plain(self, value: Any) -> Any:
        return plain.plain(value, _unwrap)

    def outcome(self, function: Callable[[], Any]) -> Any:
        """Returns the result of `function`, or the kind of its error."""
        try:
            return self.plain(function())
        except Exception as exception:
            return plain.error(exception)

    def fail(self) -> None:
        """Fails, and not before it is run."""
        raise ValueError("as it was meant to")

    def pause(self, seconds: float) -> None:
        """Takes time when it is run."""
        time.sleep(seconds)

    def embedding_lookup(self, params: Any, ids: Any) -> jax.Array:
        return tpudist.ps.embedding_lookup(params, np.asarray(ids))

    def start_afresh(self) -> None:
        """Does nothing: only TensorFlow needs it."""

    def parts(self, strategy: tpudist.Strategy, value: Any) -> list[Any]:
        """The value on each replica, also where it is equal on all of them."""
        parts = strategy.experimental_local_results(value)
        return list(parts) * (strategy.num_replicas_in_sync // len(parts))


def _unwrap(x: Any) -> Any:
    if isinstance(x, tpudist.PerReplica):
        raise TypeError(
            "A PerReplica cannot be the result of a case: use api.parts(strategy, value)."
        )
    if hasattr(x, "read_value"):  # a Variable, or a component of one
        return np.asarray(x.read_value())
    if isinstance(x, jax.Array):
        return np.asarray(x)
    if isinstance(x, np.dtype):
        return x.name
    return x
