"""The API of `tf.distribute.experimental`, and experimental features of tpudist."""

from tpudist.cluster_resolver.device_assignment import DeviceAssignment, DeviceOrderMode
from tpudist.cluster_resolver.tpu import TPUSystemMetadata, initialize_tpu_system
from tpudist.cluster_resolver.tpu_topology import Topology
from tpudist.cluster_resolver.tpu_topology_proto import HardwareFeature
from tpudist.coordinator import experimental_coordinator as coordinator, rpc
from tpudist.options import ValueContext
from tpudist.preemption import (
    PreemptionCheckpointHandler,
    PreemptionWatcher,
    Survivor,
    TerminationConfig,
    survive,
)
from tpudist.state import partitioners
from tpudist.strategies.central_storage import CentralStorageStrategy
from tpudist.strategies.deprecated_strategies import MultiWorkerMirroredStrategy, TPUStrategy
from tpudist.strategies.parameter_server import ParameterServerStrategy
from tpudist.xla.communication_options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)

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
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "Survivor",
    "TPUStrategy",
    "TPUSystemMetadata",
    "TerminationConfig",
    "Topology",
    "ValueContext",
    "coordinator",
    "initialize_tpu_system",
    "partitioners",
    "rpc",
    "survive",
]
