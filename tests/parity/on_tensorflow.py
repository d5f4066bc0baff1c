"""The adapter for TensorFlow: what a case may use of it. Of each strategy there is one object."""

import contextlib
import functools
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy, values

from . import plain, rules

NUM_DEVICES = 8


def start() -> None:
    """Makes the logical devices; before anything else in the process."""
    [cpu] = tf.config.list_physical_devices("CPU")
    configurations = [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES
    tf.config.set_logical_device_configuration(cpu, configurations)


class Api:
    """The functions that a case may use."""

    library = "tensorflow"
    aborted = False  # TensorFlow ends all collective operations of a process after an error in one
    has_servers = False  # whose strategies have no such operations
    dist = tf.distribute
    v1 = tf.compat.v1.distribute
    Variable = tf.Variable
    VariableAggregation = tf.VariableAggregation
    VariableSynchronization = tf.VariableSynchronization
    PerReplica = tf.types.experimental.distributed.PerReplica
    Mirrored = tf.types.experimental.distributed.Mirrored
    ClusterSpec = tf.train.ClusterSpec
    function = staticmethod(tf.function)
    sum = staticmethod(tf.reduce_sum)
    square = staticmethod(tf.square)
    concat = staticmethod(tf.concat)
    reshape = staticmethod(tf.reshape)

    @functools.cache  # noqa: B019 - there is one Api
    def strategy(self, name: str) -> tf.distribute.Strategy:
        if name == rules.MIRRORED:
            return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
        if name == rules.MIRRORED_8:
            return tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(NUM_DEVICES)])
        if name == rules.ONE_DEVICE:
            return tf.distribute.OneDeviceStrategy("cpu:0")
        if name == rules.CENTRAL:
            return tf.distribute.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
        if name == rules.MULTI_WORKER:  # its public constructor takes one CPU device per process
            cls = collective_all_reduce_strategy.CollectiveAllReduceStrategy
            return cls._from_local_devices([f"/device:CPU:{i}" for i in range(NUM_DEVICES)])
        if name in (rules.SERVERS, rules.PARTS):
            self.has_servers = True
            cut = tf.distribute.experimental.partitioners.FixedShardsPartitioner(rules.NUM_PARTS)
            partitioner = cut if name == rules.PARTS else None
            return tf.distribute.ParameterServerStrategy(_start_cluster(), partitioner)
        assert name == rules.DEFAULT
        return tf.distribute.get_strategy()

    def array(self, value: Any, dtype: str = "float32") -> tf.Tensor:
        return tf.constant(value, dtype)

    def cast(self, value: Any, dtype: str = "float32") -> tf.Tensor:
        return tf.cast(value, dtype)

    def ones(self, shape: Any) -> tf.Tensor:
        return tf.ones(shape)

    def shape(self, *dims: int) -> tf.TensorShape:
        return tf.TensorShape(dims)

    def dtype(self, name: str) -> tf.DType:
        return tf.as_dtype(name)

    def grad(self, function: Callable[..., Any], *at: Any) -> Any:
        """The gradients of the sum of what `function` gives."""
        at = [tf.convert_to_tensor(x) for x in at]
        with tf.GradientTape() as tape:
            tape.watch(at)
            y = function(*at)
        gradients = tape.gradient(y, at)
        return gradients[0] if len(at) == 1 else tuple(gradients)

    def repeat(self, num_times: int, body: Callable[[Any], Any], start: Any) -> Any:
        """`body` applied several times, by a loop that is part of the program."""
        step = lambda i, x: (i + 1, body(x))  # noqa: E731
        return tf.while_loop(lambda i, _: i < num_times, step, (0, start))[1]

    def dataset(
        self, arrays: Any, batch: int, drop_remainder: bool = False, sharded: bool = False
    ) -> tf.data.Dataset:
        """A batched dataset; `sharded` as TensorFlow does if not told otherwise."""
        dataset = tf.data.Dataset.from_tensor_slices(arrays)
        dataset = dataset.batch(batch, drop_remainder=drop_remainder)
        options = tf.data.Options()
        if not sharded:
            off = tf.data.experimental.AutoShardPolicy.OFF
            options.experimental_distribute.auto_shard_policy = off
        return dataset.with_options(options)

    def plain(self, value: Any) -> Any:
        return plain.plain(value, _unwrap)

    def outcome(self, function: Callable[[], Any]) -> Any:
        """Returns the result of `function`, or the kind of its error."""
        try:
            return self.plain(function())
        except Exception as exception:
            if not self.has_servers:
                self.aborted |= isinstance(exception, tf.errors.OpError)
            return plain.error(exception)

    def fail(self) -> None:
        """Fails, and not before it is run."""
        tf.debugging.Assert(False, ["as it was meant to"])

    def pause(self, seconds: float) -> None:
        """Takes time when it is run."""
        tf.py_function(lambda: time.sleep(seconds), [], [])

    def embedding_lookup(self, params: Any, ids: Any) -> tf.Tensor:
        return tf.nn.embedding_lookup(params, ids)

    def start_afresh(self) -> None:
        """Runs the following cases in another process, because this case changed global state."""
        self.aborted = True

    def parts(self, strategy: tf.distribute.Strategy, value: Any) -> list[Any]:
        """The value on each replica, also where it is equal on all of them."""
        parts = strategy.experimental_local_results(value)
        return list(parts) * (strategy.num_replicas_in_sync // len(parts))


def _start_cluster() -> tf.distribute.cluster_resolver.ClusterResolver:
    """Two workers and two parameter servers in this process, as TensorFlow's tutorial has them."""
    with contextlib.ExitStack() as sockets:
        found = [sockets.enter_context(socket.socket()) for _ in range(2 * rules.NUM_TASKS)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        hosts = [f"127.0.0.1:{one.getsockname()[1]}" for one in found]
    spec = {"worker": hosts[: rules.NUM_TASKS], "ps": hosts[rules.NUM_TASKS :]}
    cluster = tf.train.ClusterSpec(spec)
    config = tf.compat.v1.ConfigProto()
    config.inter_op_parallelism_threads = 4 * rules.NUM_TASKS  # else tasks wait for each other
    for job in spec:
        for index in range(rules.NUM_TASKS):
            server = tf.distribute.Server(cluster, job, index, protocol="grpc", config=config)
            _servers.append(server)
    return tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")


_servers: list[tf.distribute.Server] = []  # which end when they are forgotten


def _unwrap(x: Any) -> Any:
    if isinstance(x, values.PerReplica):
        raise TypeError(
            "A PerReplica cannot be the result of a case: use api.parts(strategy, value)."
        )
    if isinstance(x, values.Mirrored) and not hasattr(x, "assign"):
        first, *others = (v.numpy() for v in x.values)
        assert all(np.array_equal(first, other) for other in others), "a Mirrored value differs"
        return first
    if isinstance(x, tf.dtypes.DType | tf.TensorShape):
        return x.name if isinstance(x, tf.dtypes.DType) else x.as_list()
    if isinstance(x, tf.Tensor):
        return x.numpy()
    if isinstance(x, tf.Variable | values.DistributedVariable) or hasattr(x, "read_value"):
        return x.read_value().numpy()
    return x
