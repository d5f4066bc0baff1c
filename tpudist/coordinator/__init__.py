"""Asynchronous functions on workers, for `tpudist.ParameterServerStrategy`.

Mirrors `tf.distribute.coordinator`.
"""

from tpudist.coordinator.cluster_coordinator import ClusterCoordinator
from tpudist.coordinator.remote_value import PerWorkerValue, RemoteValue
from tpudist.coordinator.worker import experimental_get_current_worker_index

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
