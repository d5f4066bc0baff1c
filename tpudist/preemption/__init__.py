"""Runs that are asked to end: all processes save the same step, and exit for a supervisor."""

from tpudist.preemption.handler import PreemptionCheckpointHandler
from tpudist.preemption.survival.survival import survive
from tpudist.preemption.survival.survivor import Survivor
from tpudist.preemption.termination import TerminationConfig
from tpudist.preemption.watcher import PreemptionWatcher

__all__ = [
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "Survivor",
    "TerminationConfig",
    "survive",
]
