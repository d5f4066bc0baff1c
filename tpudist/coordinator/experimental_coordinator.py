"""As `tf.distribute.experimental.coordinator` still has them: the old names of `coordinator`'s."""

from tpudist.coordinator.cluster_coordinator import ClusterCoordinator
from tpudist.coordinator.remote_value import PerWorkerValue, RemoteValue

# The old name.
PerWorkerValues = PerWorkerValue

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]
