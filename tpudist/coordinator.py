"""Functions on workers that do not wait for each other; see `tpudist.ParameterServerStrategy`.

As `tf.distribute.coordinator`.
"""

from tpudist.closures.cluster_coordinator import ClusterCoordinator
from tpudist.closures.remote_value import PerWorkerValue, RemoteValue
from tpudist.closures.worker import experimental_get_current_worker_index

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
