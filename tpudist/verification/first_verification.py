"""Verifies each step at its first call, if the environment variable `TPUDIST_VERIFY` is set."""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tpudist.options import RunOptions
from tpudist.verification.report import VerificationError

if TYPE_CHECKING:
    from tpudist.verification.strategy_methods import VerifyMethods

VARIABLE = "TPUDIST_VERIFY"
"""An environment variable: 1 verifies each step at its first call."""

_log = logging.getLogger("tpudist")


def is_wanted() -> bool:
    """Returns whether the environment variable is set."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def verify_first(
    strategy: "VerifyMethods",
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict,
    options: RunOptions | None,
) -> None:
    """Verifies a step before its first call.

    Raises:
        VerificationError: If an array differs by more than rounding.
    """
    report = strategy.verify(fn, args, kwargs, options)
    if not report.ok and report.differences:
        raise VerificationError(report)
    _log.warning("%s", report)  # a warning is shown by default, and the user set the variable
