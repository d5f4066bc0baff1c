"""Options of `train`, grouped by what they configure: the folder, the reports and the stop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from tpudist.options import shorten
from tpudist.training.history import History
from tpudist.training.metrics_writers import MetricsWriter

if TYPE_CHECKING:
    from tpudist.checkpoint import Checkpoint


@dataclass(frozen=True)
class RunFolder:
    """Directory of a run, and the content that `train` stores there.

    Use one directory per run: checkpoints of a different state or of different data raise an error.

    Attributes:
        path: Directory; created if it does not exist.
        checkpoint_every: Steps between two checkpoints; by default only one at the end.
        max_to_keep: Number of recent checkpoints to keep; None keeps all.
        saved: Part of the state to save, if not all of it; only for a state that changes in place.
            An example is the adapters of a pretrained model whose other weights are loaded again.
        goodput: Whether to record the use of time, for `tpudist doctor path`.

    Raises:
        ValueError: If `checkpoint_every` is not a whole number of at least 1.
    """

    path: str | os.PathLike[str]
    checkpoint_every: int | None = None
    max_to_keep: int | None = 3
    saved: Checkpoint | None = None
    goodput: bool = False

    def __post_init__(self):
        check_interval("RunFolder", "checkpoint_every", self.checkpoint_every)


@dataclass(frozen=True)
class ReportOptions:
    """Destinations, units and format of the metrics that `train` reports.

    Attributes:
        writers: Writers of the metrics, instead of the files in the folder. They are not closed.
        items: Unit and number of items in a global batch, such as `("tokens", 4096)`, in which
            throughput is shown; by default steps.
        format_metrics: Called as `format_metrics(split, metrics)`, where the split is `train` or
            `held_out`; returns one line.
        on_start: Called with the history when the state is restored, before the first step.
    """

    writers: Sequence[MetricsWriter] | None = None
    items: tuple[str, int] | None = None
    format_metrics: Callable[[str, Mapping[str, float]], str] | None = None
    on_start: Callable[[History], None] | None = None


@dataclass(frozen=True)
class StopOptions:
    """Conditions for an early end of a run, and its exit code after SIGTERM.

    Attributes:
        should_stop: Called before each step. If it returns True in any process, the run ends in all
            processes.
        exit_when_preempted: Whether to exit with code 143 after SIGTERM, as a supervisor expects,
            when everything is saved. Otherwise `train` returns with `ended == "preempted"`.
    """

    should_stop: Callable[[], bool] | None = None
    exit_when_preempted: bool = True


def refuse_unknown_options(names: Iterable[str]) -> None:
    """Raises `TypeError` for arguments that `train` does not have, or has no longer."""
    places = (
        (RunFolder, "folder=RunFolder(folder, {}=...)"),
        (ReportOptions, "report=ReportOptions({}=...)"),
        (StopOptions, "stop=StopOptions({}=...)"),
    )
    for name in names:
        for options, place in places:
            if name in (field.name for field in fields(options)):
                raise TypeError(
                    f"train({name}=...): this option is now part of another argument. Pass "
                    f"{place.format(name)}."
                )
        raise TypeError(f"train() got an unexpected keyword argument {name!r}.")


def check_interval(owner: str, name: str, value: int | None) -> None:
    """Checks a number of steps, where None means no interval.

    Raises:
        ValueError: If `value` is not a whole number of at least 1.
    """
    if value is None:
        return
    # A bool is an int in Python, and `True` would mean every step.
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{owner}({name}={shorten(value)}): {name} must be a whole number of at least 1."
        )
