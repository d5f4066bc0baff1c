"""Options of all scripts: devices, strategy, checkpoints and caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from experiment import arguments, folder


@dataclass(frozen=True)
class RunSettings:
    """Devices, strategy, checkpoints and caches of a run."""

    strategy: Literal["auto", "one_device", "mirrored", "tpu", "multi_worker"] = "auto"
    """Strategy of the run. auto: tpu on TPUs or with --replica-axes, multi_worker with TF_CONFIG,
    otherwise mirrored on several devices and one_device on one."""
    emulate: int | None = None
    """Number of emulated CPU devices; 0 for none. The default is 8 if there is no accelerator."""
    replica_axes: str = ""
    """Mesh axes inside a replica, such as fsdp=4,tensor=2; requires --strategy tpu."""
    microbatches: int = 1
    """Number of parts that each replica computes one after the other, to save memory."""
    resume: folder.Resume = "auto"
    """auto: continue exactly from the last checkpoint in --out, or start if there is none; devices
    and strategy may differ. never: start again; files in --out move to its folder earlier-1. must:
    continue, or fail."""
    checkpoint_every: int = 50
    """Steps between checkpoints; 0 for only one at the end. Ctrl-C and SIGTERM also save one."""
    evaluations: int = 4
    """Number of evaluations on held-out data, evenly spaced; the last is at the end."""
    compilation_cache: bool = True
    """Whether to keep compiled programs in your cache folder for the next run."""


MAY_CHANGE = frozenset(RunSettings.__dataclass_fields__)
"""Options that may change when a run resumes."""


def check(run: RunSettings) -> dict[str, int]:
    """Checks the options; returns the axes inside a replica."""
    axes = arguments.check_axes(run.replica_axes, run.strategy)
    arguments.check_positive({"microbatches": run.microbatches, "evaluations": run.evaluations})
    arguments.check_not_negative({"checkpoint-every": run.checkpoint_every})
    return axes
