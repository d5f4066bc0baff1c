"""Folders of pretrained models, for tests: recorded ones, and such as are made here."""

import json
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import torch_models
from places import DATA
from tpudist.models import Transformer

RECORDED = DATA / "pretrained"
NAMES = sorted(torch_models.MODELS)
# Families whose config.json is read but not written.
ONLY_LIKE = ("gpt2", "gpt_oss", "mixtral", "olmo2", "phi3", "qwen3_moe")


def recorded_logits(name: str) -> np.ndarray:
    """Logits of `transformers` for the recorded tokens, `[batch, length, vocabulary]`."""
    return np.load(RECORDED / name / "logits.npz")["logits"]


def logits_of(model: Transformer) -> np.ndarray:
    """Logits of the model for the same tokens."""
    graph, state = nnx.split(model)
    run = jax.jit(lambda state: nnx.merge(graph, state)(torch_models.tokens()))
    return np.asarray(run(state))


def config_of(name: str, **changes) -> dict:
    """A recorded `config.json`, with other values; `...` removes a key."""
    values = json.loads((RECORDED / name / "config.json").read_text()) | changes
    return {key: value for key, value in values.items() if value is not ...}


def files_of(folder: Path) -> dict[str, bytes]:
    """Files of a folder, except the logits."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".npz"}


def values_of(model: Transformer) -> dict[str, np.ndarray]:
    """All parameters, by name."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(x.get_raw_value()) for path, x in flat}
