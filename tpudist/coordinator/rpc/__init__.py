"""Functions of a program that other programs call by name, over gRPC; messages contain no code.

For the workers and servers of one run, schedule functions instead
(`tpudist.coordinator.ClusterCoordinator`). Mirrors `tf.distribute.experimental.rpc`.
"""

from tpudist.coordinator.rpc.rpc_client import Client, StatusOrResult
from tpudist.coordinator.rpc.rpc_server import Server

__all__ = ["Client", "Server", "StatusOrResult"]
