"""What `tf.distribute` keeps under `experimental`."""

from tpudist.cluster_resolver.device_assignment import DeviceAssignment, DeviceOrderMode
from tpudist.cluster_resolver.tpu import TPUSystemMetadata, initialize_tpu_system
from tpudist.cluster_resolver.tpu_topology import Topology
from tpudist.cluster_resolver.tpu_topology_proto import HardwareFeature
from tpudist.options import ValueContext
from tpudist.preemption import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
from tpudist.reductions.communication_options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from tpudist.state import partitioners
from tpudist.strategies.central_storage import CentralStorageStrategy
from tpudist.strategies.deprecated_strategies import MultiWorkerMirroredStrategy, TPUStrategy

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
