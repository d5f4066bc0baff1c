"""Rotary positions as a `config.json` describes them, and as the transformer does.

Newer files have one object `rope_parameters`, older ones `rope_theta` and perhaps `rope_scaling`.
"""

from __future__ import annotations

import math
from typing import Any

from tpudist.models.parts.rotary_stretch import RotaryScaling
from tpudist.models.pretrained.config_error import refuse

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def parse_rotary(
    values: dict[str, Any], length_key: str = "max_position_embeddings"
) -> tuple[float, RotaryScaling | None]:
    """The base of rotary positions, and how they are stretched.

    Args:
        values: A `config.json`, of a model all of whose layers have the same positions.
        length_key: Which of its keys is the length of sequences.

    Raises:
        ValueError: They are of a kind that the transformer does not have.
    """
    key, given = _read_object(values)
    base = float(given.get("rope_theta") or values.get("rope_theta") or 10_000.0)
    return base, parse_scaling(given, key, values, length_key)


def _read_object(values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if values.get("rope_parameters"):
        return "rope_parameters", values["rope_parameters"]
    return "rope_scaling", values.get("rope_scaling") or {}


def parse_scaling(
    given: dict[str, Any],
    key: str,
    values: dict[str, Any],
    length_key: str = "max_position_embeddings",
) -> RotaryScaling | None:
    """How positions are stretched, by an object of a `config.json`; None for not at all.

    Args:
        given: The object.
        key: Its name.
        values: The whole `config.json`.
        length_key: Which of its keys is the length of sequences.

    Raises:
        ValueError: It is of a kind that the transformer does not have.
    """
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _KINDS:
        raise refuse(
            key,
            given,
            (f"has rotary positions of type {kind!r}; only {', '.join(_KINDS)} are supported"),
        )
    part = given.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if part not in (None, 1, 1.0):
        raise refuse(
            "partial_rotary_factor",
            part,
            ("turns only a part of each head; only whole heads are supported"),
        )
    if kind == "default":
        return None
    factor = given.get("factor")
    length = values.get(length_key) or 0
    if kind == "linear":
        return RotaryScaling("linear", float(factor or 0))
    if kind == "dynamic":
        return RotaryScaling("dynamic", float(factor or 0), length)
    original = (
        values.get("original_max_position_embeddings")
        or given.get("original_max_position_embeddings")
        or length
    )
    if kind == "llama3":
        low, high = given.get("low_freq_factor"), given.get("high_freq_factor")
        if low is None or high is None or factor is None:
            raise refuse(key, given, "lacks factor, low_freq_factor or high_freq_factor")
        return RotaryScaling("llama3", float(factor), original, float(low), float(high))
    factor = float(length / original if factor is None else factor)
    return RotaryScaling(
        "yarn",
        factor,
        original,
        low=float(given.get("beta_slow") or 1),
        high=float(given.get("beta_fast") or 32),
        magnitude=_magnitude_of_yarn(given, factor),
        truncate=given.get("truncate", True),
    )


def _magnitude_of_yarn(given: dict[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    weight, of_all = given.get("mscale"), given.get("mscale_all_dim")
    if weight and of_all:
        return magnitude(weight) / magnitude(of_all)
    return magnitude(1.0)


def write_scaling(scaling: RotaryScaling | None) -> dict[str, Any] | None:
    """What `rope_scaling` says of how positions are stretched."""
    if scaling is None:
        return None
    given: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        given["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        given |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if scaling.kind == "yarn":
        given |= {"beta_slow": scaling.low, "beta_fast": scaling.high}
        given |= {"attention_factor": scaling.magnitude, "truncate": scaling.truncate}
    return given
