"""Baselines that a model must beat: guesses from no byte, or from one, on the same text.

Both are counted on the training text with one added to every count, so that no byte is impossible.
"""

from __future__ import annotations

import numpy as np

NUM_BYTES = 256


def baselines(train: np.ndarray, windows: np.ndarray) -> dict[str, float]:
    """Bits per byte of every byte of `windows` but the first, by guesses counted on `train`.

    Args:
        train: `[bytes]` uint8, the training text.
        windows: `[windows, length + 1]` uint8, held-out text. The model is judged on the same
            bytes.

    Returns:
        `uniform`: every byte is as likely. `unigram`: as likely as in `train`. `bigram`: as likely
        as in `train` after the byte before it.
    """
    before, byte = windows[:, :-1], windows[:, 1:]
    unigram = np.bincount(train, minlength=NUM_BYTES) + 1.0
    pairs = train[:-1].astype(np.int64) * NUM_BYTES + train[1:]
    bigram = np.bincount(pairs, minlength=NUM_BYTES**2).reshape(NUM_BYTES, NUM_BYTES) + 1.0
    bits_unigram = -np.log2(unigram / unigram.sum())
    bits_bigram = -np.log2(bigram / bigram.sum(axis=1, keepdims=True))
    return {
        "uniform": float(np.log2(NUM_BYTES)),
        "unigram": float(bits_unigram[byte].mean()),
        "bigram": float(bits_bigram[before, byte].mean()),
    }
