"""The handwritten digits that come with scikit-learn: 1,797 images of 8 x 8, ten labels."""

from __future__ import annotations

import numpy as np


def load_digits(seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(train, held out), one image in five held out.

    Each is `{"image": [rows, 8, 8, 1] in [0, 1], "label": [rows]}`.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "--task digits requires scikit-learn, which is not installed: pip install scikit-learn"
        ) from missing
    pixels, labels = map(np.asarray, datasets.load_digits(return_X_y=True))
    order = np.random.default_rng(seed).permutation(len(labels))
    images = (pixels / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)[order]
    labels = labels.astype(np.int32)[order]
    cut = len(labels) // 5
    return (
        {"image": images[cut:], "label": labels[cut:]},
        {"image": images[:cut], "label": labels[:cut]},
    )
