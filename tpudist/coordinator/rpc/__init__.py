"""Functions of one program that others call by name; over gRPC, without code, without secrets.

For what belongs to a run of workers and servers, schedule functions instead
(`tpudist.coordinator.ClusterCoordinator`). As `tf.distribute.experimental.rpc`.
"""

from tpudist.coordinator.rpc.rpc_client import Client, StatusOrResult
from tpudist.coordinator.rpc.rpc_server import Server

__all__ = ["Client", "Server", "StatusOrResult"]
