"""The loop around a step: progress, metrics, evaluation, checkpoints, and an end that is no loss.

`train` runs a step of yours on a strategy; `make_train_step` and `make_evaluation_step` write the
usual ones.
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

__all__ = [
    "History",
    "JsonLinesWriter",
    "MetricsWriter",
    "TensorBoardWriter",
    "WandbWriter",
    "evaluate",
    "make_evaluation_step",
    "make_train_step",
    "train",
]
