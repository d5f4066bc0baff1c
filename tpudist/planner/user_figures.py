"""What a caller counts of a step, which nobody can check later: refused if it makes no sense."""

import math
import numbers
from typing import Any


def check(tokens_per_step: Any, model_flops: Any) -> None:
    """Refuses figures of a step that are none.

    Raises:
        ValueError: `tokens_per_step` is no whole number above 0, or `model_flops` no finite number
            above 0.
    """
    if tokens_per_step is not None and not (
        isinstance(tokens_per_step, numbers.Integral)
        and not isinstance(tokens_per_step, bool)
        and int(tokens_per_step) > 0
    ):
        raise ValueError(
            f"tokens_per_step={tokens_per_step!r}: it must be the number of tokens of all replicas "
            "in a step, an integer above 0. Pass None to omit tokens per second."
        )
    if model_flops is not None and not (
        isinstance(model_flops, numbers.Real) and 0 < float(model_flops) < math.inf
    ):
        raise ValueError(
            f"model_flops={model_flops!r}: it must be the number of operations of a step on all "
            "chips, above 0. Pass None to let the planner count them."
        )
