"""Public names and the modules that define them. `__init__.py` imports each on first use."""

from . import (
    checkpoint as checkpoint,
    cluster_resolver as cluster_resolver,
    compat as compat,
    coordinator as coordinator,
    errors as errors,
    experimental as experimental,
    planner as planner,
    ps as ps,
)
from .checkpoint.train_state import TrainState as TrainState
from .compat.deprecated import get_loss_reduction as get_loss_reduction
from .context import (
    experimental_set_strategy as experimental_set_strategy,
    get_replica_context as get_replica_context,
    has_strategy as has_strategy,
    in_cross_replica_context as in_cross_replica_context,
)
from .coordinator.server import Server as Server
from .goodput.goodput import record_goodput as record_goodput
from .gradients.loss_of_all_rows import loss_of_all_rows as loss_of_all_rows
from .gradients.losses import (
    compute_average_loss as compute_average_loss,
    scale_regularization_loss as scale_regularization_loss,
)
from .gradients.microbatches import (
    rows_of_microbatches as rows_of_microbatches,
    value_and_grad_in_microbatches as value_and_grad_in_microbatches,
)
from .gradients.optimizer import Optimizer as Optimizer
from .input.dataset import (
    DistributedDataset as DistributedDataset,
    DistributedIterator as DistributedIterator,
)
from .input.input_context import InputContext as InputContext
from .input.sources.numpy_arrays import NumpyDataset as NumpyDataset
from .options import (
    InputOptions as InputOptions,
    InputReplicationMode as InputReplicationMode,
    LocalMeanWarning as LocalMeanWarning,
    MutualTLS as MutualTLS,
    RunOptions as RunOptions,
    UndistributedBatchWarning as UndistributedBatchWarning,
)
from .programs.rows.row_kernels import rowwise as rowwise
from .reduce_op import (
    ReduceOp as ReduceOp,
    VariableAggregation as VariableAggregation,
    VariableSynchronization as VariableSynchronization,
)
from .reductions.algorithms import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    NcclAllReduce as NcclAllReduce,
    ReductionToOneDevice as ReductionToOneDevice,
)
from .reductions.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from .run.eager_mode import (
    functions_run_eagerly as functions_run_eagerly,
    run_functions_eagerly as run_functions_eagerly,
)
from .run.function import function as function
from .run.replica_context import ReplicaContext as ReplicaContext
from .state.placement_table import (
    PlacementTable as PlacementTable,
    describe_placement as describe_placement,
)
from .state.variable import Variable as Variable
from .strategies.mirrored import MirroredStrategy as MirroredStrategy
from .strategies.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from .strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from .strategies.parameter_server import ParameterServerStrategy as ParameterServerStrategy
from .strategies.tpu import TPUStrategy as TPUStrategy
from .strategy.current_strategy import get_strategy as get_strategy
from .strategy.extended import StrategyExtended as StrategyExtended
from .strategy.strategy import Strategy as Strategy
from .values.indexed_slices import IndexedSlices as IndexedSlices
from .values.per_replica import (
    DistributedValues as DistributedValues,
    Mirrored as Mirrored,
    PerReplica as PerReplica,
)
from .verification.report import (
    VerificationError as VerificationError,
    VerificationReport as VerificationReport,
)
from .xla.compile_log import (
    CompileRecord as CompileRecord,
    compile_log as compile_log,
)
from .xla.emulation import emulate as emulate

__version__: str
