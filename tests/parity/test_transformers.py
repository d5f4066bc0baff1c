"""The records of the package `transformers` are right, and it reads models that we write.

Only with `-m parity`. The environment variable PARITY_TORCH_PYTHON names an interpreter that has
the extra `parity-torch`, if this one has not. `tests/models/pretrained` compares with the record.
"""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
from flax import nnx

from places import PROGRAMS
from pretrained_folders import NAMES, ONLY_LIKE, RECORDED, files_of, logits_of, recorded_logits
from tpudist.models import (
    Transformer,
    TransformerConfig,
    load_pretrained,
    lora,
    save_pretrained,
)

PYTHON = os.environ.get("PARITY_TORCH_PYTHON", sys.executable)
pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def needs_transformers():
    if PYTHON == sys.executable and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install 'tpudist[parity-torch]'")


def run(*arguments):
    command = [PYTHON, str(PROGRAMS / "torch_models.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_record_is_what_transformers_gives(tmp_path):
    run("record", tmp_path)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == NAMES
    for name in NAMES:
        assert files_of(tmp_path / name) == files_of(RECORDED / name)
        found = np.load(tmp_path / name / "logits.npz")["logits"]
        np.testing.assert_allclose(found, recorded_logits(name), rtol=0, atol=5e-6)


def test_transformers_reads_saved_models(tmp_path):
    """Loaded models with a configuration of tpudist; a merged model; a new model."""
    names = [name for name in NAMES if name not in ONLY_LIKE]
    models = {name: load_pretrained(RECORDED / name, dtype="float32") for name in names}
    merged = lora.add(load_pretrained(RECORDED / "qwen2"), rank=2)
    for name, value in vars(merged.blocks).items():
        if name.endswith("_lora_b"):
            value[...] += 0.02
    models["merged"] = lora.merge(merged)
    config = TransformerConfig(
        vocabulary=48, num_layers=2, embed_dim=24, num_heads=4, num_kv_heads=2, mlp_dim=40
    )
    models["own"] = Transformer(config, rngs=nnx.Rngs(0))
    for name, model in models.items():
        save_pretrained(model, tmp_path / name, max_file_bytes=30_000)
    run("logits", *(tmp_path / name for name in models))
    for name, model in models.items():
        found = np.load(tmp_path / name / "logits.npz")["logits"]
        np.testing.assert_allclose(logits_of(model), found, rtol=0, atol=1e-5, err_msg=name)
