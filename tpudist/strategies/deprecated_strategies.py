"""Strategies of `tf.distribute.experimental`: deprecated, with other parameters."""

from tpudist.cluster_resolver import ClusterResolver, TPUClusterResolver
from tpudist.cluster_resolver.device_assignment import DeviceAssignment
from tpudist.options import warn_of_deprecation
from tpudist.strategies import multi_worker, tpu
from tpudist.xla.communication_options import CommunicationImplementation, CommunicationOptions


class MultiWorkerMirroredStrategy(multi_worker.MultiWorkerMirroredStrategy):
    """A `tpudist.MultiWorkerMirroredStrategy` with other parameters; deprecated.

    Matches `tf.distribute.experimental.MultiWorkerMirroredStrategy`.

    Args:
        communication: Same as `implementation` in `CommunicationOptions`.
        cluster_resolver: Resolver of the workers.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ):
        warn_of_deprecation(
            "tpudist.experimental.MultiWorkerMirroredStrategy",
            "use tpudist.MultiWorkerMirroredStrategy(communication_options=...)",
        )
        options = CommunicationOptions(implementation=communication)
        super().__init__(cluster_resolver, options)


class TPUStrategy(tpu.TPUStrategy):
    """A `tpudist.TPUStrategy` on all devices of the run, with other parameters; deprecated.

    Matches `tf.distribute.experimental.TPUStrategy`.

    Args:
        tpu_cluster_resolver: Same as in `tpudist.TPUStrategy`.
        device_assignment: Same as `experimental_device_assignment` in `tpudist.TPUStrategy`.
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
    ):
        warn_of_deprecation("tpudist.experimental.TPUStrategy", "use tpudist.TPUStrategy")
        super().__init__(tpu_cluster_resolver, device_assignment)
