"""What `tf.distribute` keeps under `experimental`."""

from tpudist import partitioners
from tpudist.cluster_resolver.tpu import TPUSystemMetadata, initialize_tpu_system
from tpudist.communication import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from tpudist.deprecated_strategies import MultiWorkerMirroredStrategy, TPUStrategy
from tpudist.device_assignment import DeviceAssignment, DeviceOrderMode
from tpudist.options import ValueContext
from tpudist.preemption import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
from tpudist.strategies.central_storage import CentralStorageStrategy
from tpudist.topology_proto import HardwareFeature
from tpudist.tpu_topology import Topology

# The old name.
CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DeviceAssignment",
    "DeviceOrderMode",
    "HardwareFeature",
    "MultiWorkerMirroredStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TPUStrategy",
    "TPUSystemMetadata",
    "TerminationConfig",
    "Topology",
    "ValueContext",
    "initialize_tpu_system",
    "partitioners",
]
