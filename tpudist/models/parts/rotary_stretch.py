"""Rotary positions for sequences longer than those of a model's first training.

Each kind slows the turning of pairs of dims down, so that a longer sequence sees angles that the
model has seen. What the kinds and their numbers are called in a `config.json` is in
`tpudist/models/pretrained/rotary_config.py`.

Sources: linear: arXiv 2306.15595; dynamic: "NTK-aware" scaling of the base, as in the package
`transformers`; llama3: Llama 3.1's own; yarn: arXiv 2309.00071.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class RotaryScaling:
    """How rotary positions are stretched."""

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    """linear: all alike; dynamic: by a base that grows with a sequence's length; llama3 and yarn:
    slow pairs by the factor, fast ones not, those between by a part of it."""
    factor: float
    """Factor by which sequences become longer."""
    original_length: int = 0
    """Tokens of a sequence in the first training; of no use to linear."""
    low: float = 1.0
    """Turns in the original length below which a pair is slowed by all of the factor (llama3, yarn:
    `low_freq_factor`, `beta_slow`)."""
    high: float = 4.0
    """Turns above which it is not slowed (llama3, yarn: `high_freq_factor`, `beta_fast`)."""
    magnitude: float = 1.0
    """Factor of cosines and sines (yarn)."""
    truncate: bool = True
    """Whether the bounds between slow and fast pairs are whole numbers of pairs (yarn)."""

    def __post_init__(self):
        """Refuses numbers that scale nothing."""
        if not self.factor > 0:
            raise ValueError(
                f"Rotary positions must be stretched by a factor above 0; got {self.factor}."
            )
        if self.kind != "linear" and self.original_length < 1:
            raise ValueError(
                f"Rotary scaling {self.kind!r} needs original_length, the number of tokens of a "
                f"sequence in the first training; got {self.original_length}."
            )
        if self.kind in ("llama3", "yarn") and not self.low < self.high:
            raise ValueError(
                f"Rotary scaling {self.kind!r} needs low < high, because it slows pairs with less "
                f"than low turns and keeps pairs with more than high turns; got low={self.low}, "
                f"high={self.high}."
            )


def scale_frequencies(
    scaling: RotaryScaling, frequencies: jax.Array, base: float, length: int
) -> jax.Array:
    """How far each pair turns from one position to the next, float32 `[width / 2]`.

    Args:
        scaling: How.
        frequencies: The same, as they are without.
        base: Ratio of the longest to the shortest wavelength.
        length: Positions of this sequence; only dynamic scaling depends on it.
    """
    half, factor = frequencies.shape[0], scaling.factor
    if scaling.kind == "linear":
        return frequencies / factor
    if scaling.kind == "dynamic":
        longer = max(length, scaling.original_length) / scaling.original_length
        base = base * (factor * longer - (factor - 1)) ** (half / (half - 1))
        return base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling.kind == "llama3":
        turns = scaling.original_length * frequencies / (2 * math.pi)
        fast = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    else:
        fast = 1 - _ramp_of_yarn(scaling, base, half)
    return frequencies / factor * (1 - fast) + frequencies * fast


def _ramp_of_yarn(scaling: RotaryScaling, base: float, half: int) -> jax.Array:
    """0 for pairs that turn fast, 1 for slow ones, by their number."""

    def number_of(turns: float) -> float:
        """The pair, as a fraction, that turns this often in the original length."""
        return half * math.log(scaling.original_length / (turns * 2 * math.pi)) / math.log(base)

    first, last = number_of(scaling.high), number_of(scaling.low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)  # the bound is in dims there, not in pairs
    if first == last:
        last += 0.001
    return jnp.clip((jnp.arange(half, dtype=jnp.float32) - first) / (last - first), 0, 1)
