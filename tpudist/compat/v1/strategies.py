"""The strategies as `tf.compat.v1.distribute` has them: with a `reduce` that needs no axis.

Each is a strategy of its new name too, so that `isinstance` holds for either.
"""

from typing import Any

from tpudist.options import warn_if_given, warn_of_deprecation
from tpudist.reduce_op import ReduceOp
from tpudist.strategies import central_storage, deprecated_strategies, mirrored, one_device, tpu
from tpudist.strategy import strategy

PyTree = Any


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


class TPUStrategy(Strategy, tpu.TPUStrategy):
    """As `tpudist.TPUStrategy`. As `tf.compat.v1.distribute.experimental.TPUStrategy`."""

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
        why = "strategy.run_steps(fn, iterator, num_steps) is told how many steps to run"
        warn_if_given("TPUStrategy(steps_per_run", steps_per_run, why)
        super().__init__(tpu_cluster_resolver, device_assignment)
