"""Warns of the mean of results that are each replica's share of a loss: their sum is the loss."""

import warnings
from typing import Any

from tpudist.context.weak_identity import WeakIdentityDict
from tpudist.options import LocalMeanWarning
from tpudist.values.per_replica import PerReplica
from tpudist.xla import user_code

_lines = WeakIdentityDict()
# The registry in which Python records the shown warnings, as in each module's own.
_shown: dict[Any, Any] = {}


def record(value: PerReplica, line: str) -> None:
    """Records that a result is a share of a loss.

    Args:
        value: The result.
        line: The user's line that divides by the rows of all replicas; empty if unknown.
    """
    _lines.setdefault(value.array, line)


def warn_of_mean(value: PerReplica, num_replicas: int) -> None:
    """Warns that the mean of `value` over the replicas is too small, if it is a share."""
    line = _lines.get(value.array)
    if line is None:
        return
    divided = f" (at {line})" if line else ""
    text = (
        f"Strategy.reduce('mean', ...) was given each replica's share of a loss: it was divided by "
        f"the rows of all replicas already{divided}. Its mean is {num_replicas} times smaller than "
        f"the loss on one device. Sum it: strategy.reduce('sum', loss, axis=None). To disable this "
        f"warning: warnings.filterwarnings('ignore', category=tpudist.LocalMeanWarning)."
    )
    # At the user's line, which is searched for in the stack: the number of frames of this library
    # between it and here varies, so `stacklevel` cannot name it.
    file, _, number = (user_code.line_of_call() or "unknown:0").rpartition(":")
    warnings.warn_explicit(text, LocalMeanWarning, file, int(number), registry=_shown)
