"""The programming model of `tf.distribute` on JAX: write the step for one replica.

Names are imported from their packages when they are first asked for, so `import tpudist` costs
little beside that of JAX, and a program pays for what it uses.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from tpudist import context, library_objects

if TYPE_CHECKING:
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
    from tpudist.compat.deprecated import get_loss_reduction
    from tpudist.context import (
        experimental_set_strategy,
        get_replica_context,
        has_strategy,
        in_cross_replica_context,
    )
    from tpudist.coordinator.server import Server
    from tpudist.goodput.goodput import record_goodput
    from tpudist.gradients.loss_of_all_rows import loss_of_all_rows
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
    from tpudist.programs.rows.row_kernels import rowwise
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
    from tpudist.strategy.current_strategy import get_strategy
    from tpudist.strategy.extended import StrategyExtended
    from tpudist.strategy.strategy import Strategy
    from tpudist.values.indexed_slices import IndexedSlices
    from tpudist.values.per_replica import DistributedValues, Mirrored, PerReplica
    from tpudist.verification.report import VerificationError, VerificationReport
    from tpudist.xla.compile_log import CompileRecord, compile_log
    from tpudist.xla.emulation import emulate

__version__ = "0.1.0"

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
    "VerificationError",
    "VerificationReport",
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
    "loss_of_all_rows",
    "planner",
    "ps",
    "record_goodput",
    "rows_of_microbatches",
    "rowwise",
    "run_functions_eagerly",
    "scale_regularization_loss",
    "value_and_grad_in_microbatches",
]

# Where the names are that are no modules: those imported above, for who reads types.
_HOMES = {
    "CompileRecord": "tpudist.xla.compile_log",
    "CrossDeviceOps": "tpudist.reductions.cross_device_ops",
    "DistributedDataset": "tpudist.input.dataset",
    "DistributedIterator": "tpudist.input.dataset",
    "DistributedValues": "tpudist.values.per_replica",
    "HierarchicalCopyAllReduce": "tpudist.reductions.algorithms",
    "IndexedSlices": "tpudist.values.indexed_slices",
    "InputContext": "tpudist.input.input_context",
    "InputOptions": "tpudist.options",
    "InputReplicationMode": "tpudist.options",
    "LocalMeanWarning": "tpudist.options",
    "Mirrored": "tpudist.values.per_replica",
    "MirroredStrategy": "tpudist.strategies.mirrored",
    "MultiWorkerMirroredStrategy": "tpudist.strategies.multi_worker",
    "MutualTLS": "tpudist.options",
    "NcclAllReduce": "tpudist.reductions.algorithms",
    "NumpyDataset": "tpudist.input.sources.numpy_arrays",
    "OneDeviceStrategy": "tpudist.strategies.one_device",
    "Optimizer": "tpudist.gradients.optimizer",
    "ParameterServerStrategy": "tpudist.strategies.parameter_server",
    "PerReplica": "tpudist.values.per_replica",
    "PlacementTable": "tpudist.state.placement_table",
    "ReduceOp": "tpudist.reduce_op",
    "ReductionToOneDevice": "tpudist.reductions.algorithms",
    "ReplicaContext": "tpudist.run.replica_context",
    "RunOptions": "tpudist.options",
    "Server": "tpudist.coordinator.server",
    "Strategy": "tpudist.strategy.strategy",
    "StrategyExtended": "tpudist.strategy.extended",
    "TPUStrategy": "tpudist.strategies.tpu",
    "TrainState": "tpudist.checkpoint.train_state",
    "UndistributedBatchWarning": "tpudist.options",
    "Variable": "tpudist.state.variable",
    "VariableAggregation": "tpudist.reduce_op",
    "VariableSynchronization": "tpudist.reduce_op",
    "VerificationError": "tpudist.verification.report",
    "VerificationReport": "tpudist.verification.report",
    "compile_log": "tpudist.xla.compile_log",
    "compute_average_loss": "tpudist.gradients.losses",
    "describe_placement": "tpudist.state.placement_table",
    "emulate": "tpudist.xla.emulation",
    "experimental_set_strategy": "tpudist.context",
    "function": "tpudist.run.function",
    "functions_run_eagerly": "tpudist.run.eager.eager_mode",
    "get_loss_reduction": "tpudist.compat.deprecated",
    "get_replica_context": "tpudist.context",
    "get_strategy": "tpudist.strategy.current_strategy",
    "has_strategy": "tpudist.context",
    "in_cross_replica_context": "tpudist.context",
    "loss_of_all_rows": "tpudist.gradients.loss_of_all_rows",
    "record_goodput": "tpudist.goodput.goodput",
    "rows_of_microbatches": "tpudist.gradients.microbatches",
    "rowwise": "tpudist.programs.rows.row_kernels",
    "run_functions_eagerly": "tpudist.run.eager.eager_mode",
    "scale_regularization_loss": "tpudist.gradients.losses",
    "value_and_grad_in_microbatches": "tpudist.gradients.microbatches",
}


def __dir__() -> list[str]:
    """The public names: `__all__`."""
    return sorted(__all__)


def _make_default_mode() -> context.Mode:
    from tpudist.strategy import default_strategy

    return default_strategy.make_default_mode()


context.set_default_mode_factory(_make_default_mode)


def _get_keras_opener() -> library_objects.Opener:
    from tpudist.keras import model_state

    return model_state.open_object


library_objects.register("keras", _get_keras_opener)

if not TYPE_CHECKING:  # a type checker is to find names that are not there

    def __getattr__(name: str) -> Any:
        """Returns a public name or a package, and keeps it for the next time."""
        if name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"tpudist.{name}"):
            value = importlib.import_module(f"tpudist.{name}")
        else:
            problem = f"module 'tpudist' has no attribute {name!r}"
            raise AttributeError(problem, name=name, obj=sys.modules[__name__])
        globals()[name] = value
        return value
