"""Options of calls, as frozen dataclasses; and warnings: their classes, and those of arguments."""

from tpudist.options.input_options import (
    AutoShardPolicy,
    InputOptions,
    InputReplicationMode,
    PartialBatch,
)
from tpudist.options.messages import (
    shorten,
    warn_if_given,
    warn_of_deprecation,
    warn_of_op_arguments,
)
from tpudist.options.mutual_tls import MutualTLS
from tpudist.options.run_options import ALL_COLLECTIONS, RunOptions
from tpudist.options.step_warnings import LocalMeanWarning, UndistributedBatchWarning
from tpudist.options.value_context import ValueContext

__all__ = [
    "ALL_COLLECTIONS",
    "AutoShardPolicy",
    "InputOptions",
    "InputReplicationMode",
    "LocalMeanWarning",
    "MutualTLS",
    "PartialBatch",
    "RunOptions",
    "UndistributedBatchWarning",
    "ValueContext",
    "shorten",
    "warn_if_given",
    "warn_of_deprecation",
    "warn_of_op_arguments",
]
