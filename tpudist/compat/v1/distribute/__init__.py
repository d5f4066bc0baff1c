"""The names of `tf.compat.v1.distribute`."""

from tpudist import cluster_resolver
from tpudist.compat.deprecated import get_loss_reduction
from tpudist.compat.v1.distribute import experimental
from tpudist.compat.v1.strategies import MirroredStrategy, OneDeviceStrategy, Strategy
from tpudist.context import (
    experimental_set_strategy,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
)
from tpudist.coordinator.server import Server
from tpudist.input.input_context import InputContext
from tpudist.options import InputReplicationMode, RunOptions
from tpudist.reduce_op import ReduceOp
from tpudist.reductions.algorithms import (
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from tpudist.reductions.cross_device_ops import CrossDeviceOps
from tpudist.run.replica_context import ReplicaContext
from tpudist.strategy.current_strategy import get_strategy
from tpudist.strategy.extended import StrategyExtended

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "experimental",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
