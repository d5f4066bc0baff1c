"""Rotary positions for longer sequences than in the first training of a model.

Each kind rotates pairs of dims more slowly, so that a longer sequence has angles that the model
knows. `tpudist/models/pretrained/rotary_config.py` has the names of the kinds and numbers in a
`config.json`.

Sources: linear: arXiv 2306.15595; dynamic: "NTK-aware" scaling of the base, as in the package
`transformers`; llama3: Llama 3.1; yarn: arXiv 2309.00071; longrope: arXiv 2402.13753.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class RotaryScaling:
    """Stretching of rotary positions."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    """Which pairs of dims are slowed. linear: all, by the factor; dynamic: all, by a base that
    grows with the length of a sequence; llama3 and yarn: slow pairs by the factor, fast pairs not
    at all, pairs between by a part of it; longrope: each pair by its own factor."""
    factor: float
    """Factor by which sequences become longer."""
    original_length: int = 0
    """Tokens of a sequence in the first training; linear ignores it."""
    low: float = 1.0
    """Number of turns in the original length below which a pair is slowed by the complete factor
    (llama3, yarn: `low_freq_factor`, `beta_slow`)."""
    high: float = 4.0
    """Number of turns above which a pair is not slowed (`high_freq_factor`, `beta_fast`)."""
    magnitude: float = 1.0
    """Factor of cosines and sines (yarn, longrope)."""
    truncate: bool = True
    """Whether to round the bounds between slow and fast pairs to whole pairs (yarn)."""
    short_factors: tuple[float, ...] = ()
    """Factor of each pair in sequences of at most the original length (longrope)."""
    long_factors: tuple[float, ...] = ()
    """Factor of each pair in longer sequences (longrope)."""

    def __post_init__(self):
        """Raises ValueError for numbers that do not describe a stretching."""
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
    """Returns the angle of each pair from one position to the next, float32 `[width / 2]`.

    Args:
        scaling: Stretching.
        frequencies: Angles without stretching, `[width / 2]`.
        base: Ratio of the longest to the shortest wavelength.
        length: Number of positions of this sequence, for dynamic and longrope scaling.
    """
    half, factor = frequencies.shape[0], scaling.factor
    if scaling.kind == "longrope":
        is_long = length > scaling.original_length
        factors = scaling.long_factors if is_long else scaling.short_factors
        if len(factors) != half:
            raise ValueError(
                f"Rotary scaling 'longrope' has {len(factors)} factors, but a head turns {half} "
                f"pairs of dims. Pass {half} short_factors and long_factors."
            )
        return frequencies / jnp.asarray(factors, jnp.float32)
    if scaling.kind == "linear":
        return frequencies / factor
    if scaling.kind == "dynamic":
        longer = max(length, scaling.original_length) / scaling.original_length
        # The angle of a single pair (half 1) does not depend on the base.
        base = base * (factor * longer - (factor - 1)) ** (half / max(half - 1, 1))
        return base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling.kind == "llama3":
        # Full turns of a pair within the original length: fast pairs have many, slow ones less than
        # one.
        turns = scaling.original_length * frequencies / (2 * math.pi)
        share_of_fast = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    else:
        share_of_fast = 1 - _ramp_of_yarn(scaling, base, half)
    return frequencies / factor * (1 - share_of_fast) + frequencies * share_of_fast


def _ramp_of_yarn(scaling: RotaryScaling, base: float, half: int) -> jax.Array:
    """Returns 0 for fast pairs, 1 for slow ones, and a ramp between, `[width / 2]`."""

    def pair_with(turns: float) -> float:  # as a fraction
        return half * math.log(scaling.original_length / (turns * 2 * math.pi)) / math.log(base)

    first, last = pair_with(scaling.high), pair_with(scaling.low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper bound is in dims instead of pairs, as in the package `transformers`.
    first, last = max(first, 0), min(last, 2 * half - 1)
    if first == last:
        # The same guard against a division by 0 as in the package `transformers`.
        last += 0.001
    return jnp.clip((jnp.arange(half, dtype=jnp.float32) - first) / (last - first), 0, 1)
