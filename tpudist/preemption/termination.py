"""TerminationConfig: how a run detects that it must end, and what it does then."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax

from tpudist.cluster_resolver.base import ClusterResolver
from tpudist.preemption import gce
from tpudist.processes.exit_codes import EXIT_PREEMPTED

SIGTERM = "SIGTERM"
WATCHER_FN = "termination_watcher_fn"
URGENT = (SIGTERM, gce.PREEMPTED)
"""Reasons that end a grace period which another reason has begun."""


class TerminationConfig:
    """Options of `PreemptionCheckpointHandler`; None is the default of the platform.

    Mirrors `tf.distribute.experimental.TerminationConfig`, in which the watcher function replaces
    SIGTERM, and the default exit code is 42 outside of Google's cloud.

    The options must be the same in all processes.

    Args:
        termination_watcher_fn: Called once per second in a thread; returns soon, whether the
            process must end soon. If it raises an error, the next step raises it. The default asks
            the metadata server on Google's cloud, and nothing elsewhere. SIGTERM always counts.
        exit_fn: Called without arguments after the last save; by default `sys.exit(143)`. If it
            returns, the program continues, and the handler no longer watches.
        grace_period: Seconds from the notice to the shutdown. If positive, the state is saved at
            once and training continues. It is saved again, and the program ends, shortly before
            the shutdown. The default is 3600 for maintenance of a machine with a GPU on Google's
            cloud, otherwise 0.
        save_fn: Called instead of the manager's `save`, with the arguments of
            `save_checkpoint_if_preempted`, in all processes.

    Raises:
        TypeError: If a function is not callable.
        ValueError: If `grace_period` is not a number of seconds of at least 0.
    """

    def __init__(
        self,
        termination_watcher_fn: Callable[[], Any] | None = None,
        exit_fn: Callable[[], Any] | None = None,
        grace_period: float | None = None,
        save_fn: Callable[..., Any] | None = None,
    ):
        for name, fn in (
            ("termination_watcher_fn", termination_watcher_fn),
            ("exit_fn", exit_fn),
            ("save_fn", save_fn),
        ):
            if fn is not None and not callable(fn):
                raise TypeError(f"TerminationConfig({name}={fn!r}): {name} must be a function.")
        if grace_period is not None and (
            isinstance(grace_period, bool)
            or not isinstance(grace_period, int | float)
            or not 0 <= grace_period < math.inf
        ):
            raise ValueError(
                f"TerminationConfig(grace_period={grace_period!r}): grace_period must be a number "
                f"of seconds of at least 0."
            )
        self.termination_watcher_fn = termination_watcher_fn
        self.exit_fn = exit_fn
        self.grace_period = grace_period
        self.save_fn = save_fn


@dataclasses.dataclass(frozen=True)
class Termination:
    """A TerminationConfig with the defaults of the platform.

    Attributes:
        watcher: Called without arguments; returns why the run must end, or None. None if only
            SIGTERM counts.
        exit_fn: Called without arguments to end the program.
        grace_s: Reason -> seconds of its grace period.
        usual_grace_s: Seconds of the grace period after other reasons.
        save_fn: Called to save instead of the manager, or None.
    """

    watcher: Callable[[], str | None] | None
    exit_fn: Callable[[], Any]
    grace_s: dict[str, float]
    usual_grace_s: float
    save_fn: Callable[..., Any] | None

    def grace_after(self, why: str) -> float:
        """Returns the seconds between a notice for this reason and the end."""
        return self.grace_s.get(why, self.usual_grace_s)


def fill_defaults(
    config: TerminationConfig | None, cluster_resolver: ClusterResolver | None
) -> Termination:
    """Returns `config` with the defaults of the platform. May start JAX's devices to find it."""
    config = config or TerminationConfig()
    watcher: Callable[[], str | None] | None = None
    if config.termination_watcher_fn is not None:
        watcher = functools.partial(_watcher_reason, config.termination_watcher_fn)
    elif gce.is_gce(cluster_resolver):
        watcher = gce.MetadataWatcher()
    has_long_notice = config.grace_period is None and jax.local_devices()[0].platform == "gpu"
    return Termination(
        watcher=watcher,
        exit_fn=config.exit_fn or (lambda: sys.exit(EXIT_PREEMPTED)),
        grace_s={gce.MAINTENANCE: gce.GPU_GRACE_S} if has_long_notice else {},
        usual_grace_s=float(config.grace_period or 0.0),
        save_fn=config.save_fn,
    )


def _watcher_reason(watcher_fn: Callable[[], Any]) -> str | None:
    return WATCHER_FN if watcher_fn() else None
