"""The programming model of `tf.distribute` on JAX: write the step for one replica."""

from tpudist import (
    checkpoint,
    cluster_resolver,
    compat,
    coordinator,
    errors,
    experimental,
    planner,
    ps,
)
from tpudist.checkpoint.train_state import TrainState
from tpudist.context import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from tpudist.coordinator.server import Server
from tpudist.deprecated import get_loss_reduction
from tpudist.gradients.losses import compute_average_loss, scale_regularization_loss
from tpudist.gradients.microbatches import rows_of_microbatches, value_and_grad_in_microbatches
from tpudist.gradients.optimizer import Optimizer
from tpudist.input.dataset import DistributedDataset, DistributedIterator
from tpudist.input.input_context import InputContext
from tpudist.input.sources.numpy_arrays import NumpyDataset
from tpudist.options import (
    InputOptions,
    InputReplicationMode,
    LocalMeanWarning,
    MutualTLS,
    RunOptions,
    UndistributedBatchWarning,
)
from tpudist.reduce_op import ReduceOp, VariableAggregation, VariableSynchronization
from tpudist.reductions.algorithms import (
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from tpudist.reductions.cross_device_ops import CrossDeviceOps
from tpudist.run.eager.eager_mode import functions_run_eagerly, run_functions_eagerly
from tpudist.run.function import function
from tpudist.run.replica_context import ReplicaContext
from tpudist.state.placement_table import PlacementTable, describe_placement
from tpudist.state.variable import Variable
from tpudist.strategies.mirrored import MirroredStrategy
from tpudist.strategies.multi_worker import MultiWorkerMirroredStrategy
from tpudist.strategies.one_device import OneDeviceStrategy
from tpudist.strategies.parameter_server import ParameterServerStrategy
from tpudist.strategies.tpu import TPUStrategy
from tpudist.strategy import default_strategy
from tpudist.strategy.extended import StrategyExtended
from tpudist.strategy.strategy import Strategy
from tpudist.values.indexed_slices import IndexedSlices
from tpudist.values.per_replica import DistributedValues, Mirrored, PerReplica
from tpudist.xla.compile_log import CompileRecord, compile_log
from tpudist.xla.goodput import record_goodput
from tpudist.xla.rows.row_kernels import rowwise
from tpudist.xla.runtime import emulate

__version__ = "0.1.0"

default_strategy.install()

__all__ = [
    "CompileRecord",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "LocalMeanWarning",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "MutualTLS",
    "NcclAllReduce",
    "NumpyDataset",
    "OneDeviceStrategy",
    "Optimizer",
    "ParameterServerStrategy",
    "PerReplica",
    "PlacementTable",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "TrainState",
    "UndistributedBatchWarning",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "checkpoint",
    "cluster_resolver",
    "compat",
    "compile_log",
    "compute_average_loss",
    "coordinator",
    "describe_placement",
    "emulate",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "function",
    "functions_run_eagerly",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "planner",
    "ps",
    "record_goodput",
    "rows_of_microbatches",
    "rowwise",
    "run_functions_eagerly",
    "scale_regularization_loss",
    "value_and_grad_in_microbatches",
]


def __dir__() -> list[str]:
    """The public names: those of the rooms are found in the rooms."""
    return sorted(__all__)
