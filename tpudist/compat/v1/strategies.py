"""The strategies of `tf.compat.v1.distribute`, whose `reduce` needs no axis.

Each is a subclass of the strategy with the current name, so `isinstance` holds for both.
"""

from typing import Any

from tpudist.array_types import PyTree
from tpudist.cluster_resolver import (
    ClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
)
from tpudist.cluster_resolver.device_assignment import DeviceAssignment
from tpudist.options import warn_if_given, warn_of_deprecation
from tpudist.reduce_op import ReduceOp
from tpudist.strategies import (
    central_storage,
    deprecated_strategies,
    mirrored,
    one_device,
    parameter_server,
    tpu,
)
from tpudist.strategy import strategy


class Strategy(strategy.Strategy):
    """`tpudist.Strategy` with the `reduce` of `tf.compat.v1.distribute.Strategy`."""

    def reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, axis: int | tuple[int, ...] | None = None
    ) -> PyTree:
        """Combines `value` over the replicas; see `tpudist.Strategy.reduce`."""
        return super().reduce(reduce_op, value, axis)


# `Strategy` must be the first base of each class below: its `reduce` then comes before the one of
# the current strategy, whose `axis` has no default. `super().reduce` still reaches the override of
# the current strategy, if it has one.
class MirroredStrategy(Strategy, mirrored.MirroredStrategy):
    """`tpudist.MirroredStrategy` as `tf.compat.v1.distribute.MirroredStrategy`."""


class OneDeviceStrategy(Strategy, one_device.OneDeviceStrategy):
    """`tpudist.OneDeviceStrategy` as `tf.compat.v1.distribute.OneDeviceStrategy`."""


class CentralStorageStrategy(Strategy, central_storage.CentralStorageStrategy):
    """`tpudist.experimental.CentralStorageStrategy` with the older `reduce`."""


class MultiWorkerMirroredStrategy(Strategy, deprecated_strategies.MultiWorkerMirroredStrategy):
    """`tpudist.experimental.MultiWorkerMirroredStrategy`, which is deprecated."""


class ParameterServerStrategy(Strategy, parameter_server.ParameterServerStrategy):
    """`tpudist.ParameterServerStrategy`, with the cluster of TF_CONFIG by default.

    `tpudist.coordinator.ClusterCoordinator` runs functions on workers, where
    `tf.compat.v1.distribute.experimental.ParameterServerStrategy` needed an Estimator.

    Args:
        cluster_resolver: Resolver of the workers and servers; by default TF_CONFIG, unless
            `options` contain their numbers.
        **options: Other arguments of `tpudist.ParameterServerStrategy`.
    """

    def __init__(self, cluster_resolver: ClusterResolver | None = None, **options: Any):
        # With a number of workers or servers, the strategy starts them itself on this host. Only
        # without these numbers does it need a cluster from the environment, as in TensorFlow.
        if cluster_resolver is None and not {"num_workers", "num_servers"} & options.keys():
            cluster_resolver = TFConfigClusterResolver()
        super().__init__(cluster_resolver, **options)


class TPUStrategy(Strategy, tpu.TPUStrategy):
    """`tpudist.TPUStrategy` on all devices of the run; deprecated.

    Mirrors `tf.compat.v1.distribute.experimental.TPUStrategy`.

    Args:
        tpu_cluster_resolver: Same as in `tpudist.TPUStrategy`.
        steps_per_run: Ignored, with a warning. Pass a number of steps to `run_steps` instead.
        device_assignment: Same as `experimental_device_assignment` in `tpudist.TPUStrategy`.

    Attributes:
        steps_per_run: Argument `steps_per_run`, also of `extended`; 1 by default.
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        steps_per_run: int | None = None,
        device_assignment: DeviceAssignment | None = None,
    ):
        warn_of_deprecation(
            "tpudist.compat.v1.distribute.experimental.TPUStrategy", "use tpudist.TPUStrategy"
        )
        reason = "pass the number of steps to strategy.run_steps(fn, iterator, num_steps)"
        warn_if_given("TPUStrategy(steps_per_run", steps_per_run, reason)
        super().__init__(tpu_cluster_resolver, device_assignment)
        # Read by `extended.steps_per_run`, never by a step; the current strategy has a class
        # attribute.
        self.steps_per_run = 1 if steps_per_run is None else steps_per_run
