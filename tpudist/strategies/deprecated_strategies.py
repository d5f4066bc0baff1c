"""Strategies as `tf.distribute.experimental` has them still: deprecated, with other parameters."""

from typing import Any

from tpudist.options import warn_of_deprecation
from tpudist.strategies import multi_worker, tpu
from tpudist.xla.communication_options import (
    CommunicationImplementation,
    CommunicationOptions,
)


class MultiWorkerMirroredStrategy(multi_worker.MultiWorkerMirroredStrategy):
    """As `tpudist.MultiWorkerMirroredStrategy`, but for its parameters; deprecated.

    As `tf.distribute.experimental.MultiWorkerMirroredStrategy`.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: Any = None,
    ):
        """Connects the workers; see `tpudist.MultiWorkerMirroredStrategy`.

        Args:
            communication: See `CommunicationOptions.implementation`.
            cluster_resolver: Who the workers are.
        """
        warn_of_deprecation(
            "tpudist.experimental.MultiWorkerMirroredStrategy",
            "use tpudist.MultiWorkerMirroredStrategy(communication_options=...)",
        )
        options = CommunicationOptions(implementation=communication)
        super().__init__(cluster_resolver, options)


class TPUStrategy(tpu.TPUStrategy):
    """As `tpudist.TPUStrategy`, but for its parameters; deprecated.

    As `tf.distribute.experimental.TPUStrategy`.
    """

    def __init__(self, tpu_cluster_resolver: Any = None, device_assignment: Any = None):
        """On all devices of the run; see `tpudist.TPUStrategy`.

        Args:
            tpu_cluster_resolver: See there.
            device_assignment: See `experimental_device_assignment` there.
        """
        warn_of_deprecation("tpudist.experimental.TPUStrategy", "use tpudist.TPUStrategy")
        super().__init__(tpu_cluster_resolver, device_assignment)
