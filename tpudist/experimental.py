"""What `tf.distribute` keeps under `experimental`."""

import typing

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


if not typing.TYPE_CHECKING:  # which would take any name to be there

    def __getattr__(name: str) -> typing.NoReturn:
        """Says of a name of `tf.distribute.experimental` that it is not offered yet."""
        if name in ("ParameterServerStrategy", "coordinator", "rpc"):
            raise AttributeError(
                f"tpudist.experimental.{name} is not offered yet: parameter servers are still to "
                f"come. MirroredStrategy, TPUStrategy and MultiWorkerMirroredStrategy train in "
                f"step."
            )
        raise AttributeError(f"module 'tpudist.experimental' has no attribute {name!r}")
