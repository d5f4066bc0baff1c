"""The examples and the initial weights of the programs: the same on both sides."""

from typing import Any

import numpy as np

NUM_EXAMPLES = 24
NUM_CLASSES, NUM_FEATURES, NUM_TOKENS, NUM_STEPS = 3, 8, 7, 5

_random = np.random.RandomState(0)


def _normal(*shape: int) -> np.ndarray:
    return _random.randn(*shape).astype(np.float32)


def _integers(low: int, high: int, *shape: int) -> np.ndarray:
    return _random.randint(low, high, shape).astype(np.int32)


features = _normal(NUM_EXAMPLES, NUM_FEATURES)
others = _normal(NUM_EXAMPLES, NUM_FEATURES)
targets = np.tanh(features).sum(axis=1, keepdims=True).astype(np.float32)
labels = np.argmax(features @ _normal(NUM_FEATURES, NUM_CLASSES), axis=1).astype(np.int32)
images = _normal(NUM_EXAMPLES, 6, 6, 2) + 0.5 * labels.astype(np.float32)[:, None, None, None]
tokens = _integers(0, NUM_TOKENS, NUM_EXAMPLES, NUM_STEPS + 1)
frames = _normal(NUM_EXAMPLES, 8, 4)
words = _integers(1, 5, NUM_EXAMPLES, 2)
scores = _normal(NUM_EXAMPLES)


def weights(name: str, *shape: int) -> np.ndarray:
    """Initial values: those of one name and shape are always the same."""
    seed = sum(name.encode()) + len(shape)
    scale = 1 / np.sqrt(np.prod(shape[:-1]))
    return (np.random.RandomState(seed).randn(*shape) * scale).astype(np.float32)


def summary(value: Any) -> list[float]:
    """Two numbers that tell whether an array is another one."""
    flat = np.asarray(value, np.float64).ravel()
    return [float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(flat.size)))]
