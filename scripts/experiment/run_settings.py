"""What every run of a script may be asked for: where it computes, and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from experiment import arguments, folder


@dataclass(frozen=True)
class RunSettings:
    """Where a run computes, and what it keeps."""

    strategy: Literal["auto", "one_device", "mirrored", "tpu", "multi_worker"] = "auto"
    """Where replicas live. Auto: tpu on TPUs or with --replica-axes, multi_worker with TF_CONFIG,
    else mirrored on several devices and one_device on one."""
    emulate: int | None = None
    """Emulate so many devices on the CPU; 0 for none. By default 8 if there is no accelerator."""
    replica_axes: str = ""
    """Mesh axes inside a replica, such as fsdp=4,tensor=2, for --strategy tpu."""
    microbatches: int = 1
    """Parts that each replica computes its examples in, one after the other, to save memory."""
    resume: folder.Resume = "auto"
    """Auto: go on exactly where the checkpoints in --out end, or start if there are none; devices
    and strategy may be others. Never: start anew; what is there moves to earlier-1 beside it. Must:
    go on, or fail."""
    checkpoint_every: int = 50
    """Steps between checkpoints; 0 for one at the end only. Ctrl-C and SIGTERM save one too."""
    evaluations: int = 4
    """How often the held-out loss is measured, evenly spaced; the last time at the end."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder for the next run."""


MAY_CHANGE = frozenset(RunSettings.__dataclass_fields__)
"""They may all be others when a run goes on: where and how fast it computes, and what it keeps."""


def check(run: RunSettings) -> dict[str, int]:
    """Refuses what cannot work; returns the axes inside a replica."""
    axes = arguments.check_axes(run.replica_axes, run.strategy)
    arguments.check_positive({"microbatches": run.microbatches, "evaluations": run.evaluations})
    arguments.check_not_negative({"checkpoint-every": run.checkpoint_every})
    return axes
