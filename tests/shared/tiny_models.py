"""A model in a folder, as scripts/finetune.py makes it, but smaller: for tests."""

import dataclasses
from pathlib import Path

import pytest

import tpudist
from experiment import tiny_model


def make_tiny_model(folder: Path) -> Path:
    """Two layers, two steps."""
    with pytest.MonkeyPatch.context() as patch:
        small = {"num_layers": 2, "embed_dim": 16, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 24}
        patch.setattr(tiny_model, "VOCABULARY", 300)
        patch.setattr(tiny_model, "TEXT_BYTES", 60_000)
        patch.setattr(tiny_model, "LENGTH", 32)
        patch.setattr(
            tiny_model, "CONFIG", dataclasses.replace(tiny_model.CONFIG, vocabulary=300, **small)
        )
        strategy = tpudist.MirroredStrategy()
        tiny_model.make_tiny_model(strategy, folder, False, num_steps=2)
    return folder
