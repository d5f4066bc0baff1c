"""The strategies as `tf.compat.v1.distribute` has them: with a `reduce` that needs no axis.

Each is a strategy of its new name too, so that `isinstance` holds for either.
"""

from typing import Any

from tpudist.array_types import PyTree
from tpudist.cluster_resolver import ClusterResolver, TFConfigClusterResolver
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
    """As `tpudist.Strategy`, but for `reduce`. As `tf.compat.v1.distribute.Strategy`."""

    def reduce(self, reduce_op: ReduceOp | str, value: PyTree, axis: Any = None) -> PyTree:
        """Combines `value` over replicas; see `tpudist.Strategy.reduce`."""
        return super().reduce(reduce_op, value, axis)


class MirroredStrategy(Strategy, mirrored.MirroredStrategy):
    """As `tpudist.MirroredStrategy`. As `tf.compat.v1.distribute.MirroredStrategy`."""


class OneDeviceStrategy(Strategy, one_device.OneDeviceStrategy):
    """As `tpudist.OneDeviceStrategy`. As `tf.compat.v1.distribute.OneDeviceStrategy`."""


class CentralStorageStrategy(Strategy, central_storage.CentralStorageStrategy):
    """As `tpudist.experimental.CentralStorageStrategy`."""


class MultiWorkerMirroredStrategy(Strategy, deprecated_strategies.MultiWorkerMirroredStrategy):
    """As `tpudist.experimental.MultiWorkerMirroredStrategy`, which is deprecated."""


class ParameterServerStrategy(Strategy, parameter_server.ParameterServerStrategy):
    """As `tpudist.ParameterServerStrategy`, with the cluster of TF_CONFIG by default.

    Functions run on workers by `tpudist.coordinator.ClusterCoordinator`, where
    `tf.compat.v1.distribute.experimental.ParameterServerStrategy` needed an Estimator.
    """

    def __init__(self, cluster_resolver: ClusterResolver | None = None, **options: Any):
        """Starts the servers; see `tpudist.ParameterServerStrategy`.

        Args:
            cluster_resolver: Workers and servers; by default those of TF_CONFIG, unless `options`
                say how many there are.
            **options: See there.
        """
        if cluster_resolver is None and not {"num_workers", "num_servers"} & options.keys():
            cluster_resolver = TFConfigClusterResolver()
        super().__init__(cluster_resolver, **options)


class TPUStrategy(Strategy, tpu.TPUStrategy):
    """As `tpudist.TPUStrategy`. As `tf.compat.v1.distribute.experimental.TPUStrategy`.

    Attributes:
        steps_per_run: What it was made with; also of `extended`. Without effect.
    """

    def __init__(
        self,
        tpu_cluster_resolver: Any = None,
        steps_per_run: int | None = None,
        device_assignment: Any = None,
    ):
        """On all devices of the run; see `tpudist.TPUStrategy`.

        Args:
            tpu_cluster_resolver: See there.
            steps_per_run: Accepted, with a warning: `run_steps` is told how many steps to run.
            device_assignment: See `experimental_device_assignment` there.
        """
        warn_of_deprecation(
            "tpudist.compat.v1.distribute.experimental.TPUStrategy", "use tpudist.TPUStrategy"
        )
        why = "pass the number of steps to strategy.run_steps(fn, iterator, num_steps)"
        warn_if_given("TPUStrategy(steps_per_run", steps_per_run, why)
        super().__init__(tpu_cluster_resolver, device_assignment)
        self.steps_per_run = 1 if steps_per_run is None else steps_per_run
