"""A training loop with progress, metrics, evaluation, checkpoints and exact resume.

`train` runs your step on a strategy; `make_train_step` and `make_evaluation_step` create the usual
steps.
"""

from tpudist.training.history import History
from tpudist.training.loop import train
from tpudist.training.metrics_writers import (
    JsonLinesWriter,
    MetricsWriter,
    TensorBoardWriter,
    WandbWriter,
)
from tpudist.training.steps import evaluate, make_evaluation_step, make_train_step
from tpudist.training.train_options import ReportOptions, RunFolder, StopOptions

__all__ = [
    "History",
    "JsonLinesWriter",
    "MetricsWriter",
    "ReportOptions",
    "RunFolder",
    "StopOptions",
    "TensorBoardWriter",
    "WandbWriter",
    "evaluate",
    "make_evaluation_step",
    "make_train_step",
    "train",
]
