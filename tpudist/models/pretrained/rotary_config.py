"""Rotary positions in a `config.json`, from and to `RotaryScaling`.

Newer files have one object `rope_parameters`; older ones have `rope_theta` and perhaps
`rope_scaling`.
"""

from __future__ import annotations

import math
from typing import Any

from tpudist.models.parts.rotary_stretch import RotaryScaling
from tpudist.models.pretrained.config_error import config_error

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def parse_rotary(
    values: dict[str, Any], length_key: str = "max_position_embeddings"
) -> tuple[float, RotaryScaling | None]:
    """Returns the base and the stretching of rotary positions.

    Args:
        values: `config.json` of a model with the same positions in all layers.
        length_key: Key of the length of sequences.

    Raises:
        ValueError: If the transformer does not support the kind of positions.
    """
    key = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    parameters = values.get(key) or {}
    base = float(parameters.get("rope_theta") or values.get("rope_theta") or 10_000.0)
    return base, parse_scaling(parameters, key, values, length_key)


def parse_scaling(
    parameters: dict[str, Any],
    key: str,
    values: dict[str, Any],
    length_key: str = "max_position_embeddings",
    partial: bool = False,
) -> RotaryScaling | None:
    """Returns the stretching that an object of a `config.json` describes; None for none.

    Args:
        parameters: Object.
        key: Key of the object.
        values: Complete `config.json`.
        length_key: Key of the length of sequences.
        partial: Whether only a part of each head may be turned.

    Raises:
        ValueError: If the transformer does not support the kind of positions.
    """
    # "type" is the older name of "rope_type".
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _KINDS:
        reason = f"has rotary positions of type {kind!r}; only {', '.join(_KINDS)} are supported"
        raise config_error(key, parameters, reason)
    part = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if part not in (None, 1, 1.0) and not partial:
        reason = "turns only a part of each head; only whole heads are supported"
        raise config_error("partial_rotary_factor", part, reason)
    factor = parameters.get("factor")
    length = values.get(length_key) or 0
    original = (
        values.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or length
    )
    # A missing factor becomes 0, which `RotaryScaling` rejects with a message about the factor.
    if kind == "linear":
        return RotaryScaling("linear", float(factor or 0))
    if kind == "dynamic":
        return RotaryScaling("dynamic", float(factor or 0), length)
    if kind == "llama3":
        low, high = parameters.get("low_freq_factor"), parameters.get("high_freq_factor")
        if low is None or high is None or factor is None:
            reason = "lacks factor, low_freq_factor or high_freq_factor"
            raise config_error(key, parameters, reason)
        return RotaryScaling("llama3", float(factor), original, float(low), float(high))
    if kind == "longrope":
        return _parse_longrope(parameters, length / original if original else 0, original)
    if kind == "yarn":
        if factor is None:
            # As in the package `transformers`.
            factor = length / original if original else 0
        return _parse_yarn(parameters, float(factor), original)
    return None


def _parse_yarn(parameters: dict[str, Any], factor: float, original: int) -> RotaryScaling:
    return RotaryScaling(
        "yarn",
        factor,
        original,
        low=float(parameters.get("beta_slow") or 1),
        high=float(parameters.get("beta_fast") or 32),
        magnitude=_magnitude_of_yarn(parameters, factor),
        truncate=parameters.get("truncate", True),
    )


def _parse_longrope(parameters: dict[str, Any], factor: float, original: int) -> RotaryScaling:
    magnitude = parameters.get("attention_factor")
    if magnitude is None:  # as in the package `transformers`
        is_longer = factor > 1
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if is_longer else 1.0
    return RotaryScaling(
        "longrope",
        factor,
        original,
        magnitude=magnitude,
        short_factors=tuple(parameters.get("short_factor", ())),
        long_factors=tuple(parameters.get("long_factor", ())),
    )


def _magnitude_of_yarn(parameters: dict[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        # Equation of the YaRN paper: sqrt(1 / t) = 0.1 ln(s) + 1. DeepSeek multiplies the
        # logarithm by `mscale`.
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    # As in the package `transformers`.
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    weight, total_weight = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if weight and total_weight:
        return magnitude(weight) / magnitude(total_weight)
    return magnitude(1.0)


def write_scaling(scaling: RotaryScaling | None) -> dict[str, Any] | None:
    """Returns the value of `rope_scaling` for a stretching."""
    if scaling is None:
        return None
    parameters: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        parameters |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if scaling.kind == "yarn":
        parameters |= {"beta_slow": scaling.low, "beta_fast": scaling.high}
        parameters |= {"attention_factor": scaling.magnitude, "truncate": scaling.truncate}
    return parameters
