"""Checks of the figures of a step that the caller counts; nothing can check them later."""

import math
import numbers


def check(tokens_per_step: object, model_flops: object) -> None:
    """Checks the figures of a step; None stands for a missing figure.

    Raises:
        ValueError: If `tokens_per_step` is not an integer above 0, or `model_flops` is not a finite
            number above 0.
    """
    if tokens_per_step is not None and not (
        # A NumPy integer is an Integral; a bool is one as well, but never a count.
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
