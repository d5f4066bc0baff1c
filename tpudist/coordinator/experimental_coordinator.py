"""The earlier names of `tpudist.coordinator`, as in `tf.distribute.experimental.coordinator`."""

from tpudist.coordinator.cluster_coordinator import ClusterCoordinator
from tpudist.coordinator.remote_value import PerWorkerValue, RemoteValue

PerWorkerValues = PerWorkerValue

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]
