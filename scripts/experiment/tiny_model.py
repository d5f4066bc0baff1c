"""A small language model in a folder, as others are fetched: for machines without a network.

A transformer of Llama's kind with a byte-level BPE tokenizer, both of the source of Python's
standard library, in `config.json`, `model.safetensors` and `tokenizer.json`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import tpudist
from experiment.batches import RandomWindows
from experiment.optimizers import warmup_cosine
from tpudist.models import Transformer, TransformerConfig, next_token_nats, save_pretrained
from tpudist.processes import coordination
from tpudist.training.corpus import load_corpus
from tpudist.training.display import Display
from tpudist.training.loop import train
from tpudist.training.steps import make_train_step
from tpudist.training.train_options import ReportOptions

END = "<|endoftext|>"
VOCABULARY = 1024
TEXT_BYTES = 3_000_000
"""Bytes of the text that train the tokenizer and the model."""
LENGTH, BATCH_SIZE = 128, 16
NUM_STEPS = 120
"""Default number of training steps."""

CONFIG = TransformerConfig(
    vocabulary=VOCABULARY,
    num_layers=4,
    embed_dim=128,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=384,
)


def make_tiny_model(
    strategy: tpudist.Strategy, folder: Path, display: Display | bool, *, num_steps: int = NUM_STEPS
) -> None:
    """Trains the tokenizer and the model, and writes them; called by all processes alike.

    Args:
        strategy: Trains the model.
        folder: Folder that is created atomically.
        display: Shows the progress.
        num_steps: Number of training steps.

    Raises:
        ModuleNotFoundError: tokenizers is not installed.
    """
    text = load_corpus().train[:TEXT_BYTES].tobytes().decode("utf-8", errors="ignore")
    tokenizer = train_tokenizer(text)
    tokens = np.asarray(tokenizer.encode(text).ids, np.int32)
    model = strategy.create(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)))
    schedule = warmup_cosine(3e-3, num_steps)
    optimizer = strategy.create(
        lambda model: tpudist.Optimizer(optax.adamw(schedule, b2=0.95), model), model
    )
    loss_of = make_train_step(lambda model, batch: next_token_nats(model, batch["tokens"]).mean(-1))

    def pretrain_step(model: Any, optimizer: Any, batch: Any) -> dict[str, jax.Array]:
        return {"loss": loss_of(model, optimizer, batch)}

    data = RandomWindows(tokens, LENGTH, BATCH_SIZE, 0, num_steps)
    report = ReportOptions(items=("tokens", BATCH_SIZE * LENGTH))
    train(
        strategy,
        pretrain_step,
        (model, optimizer),
        data,
        num_steps=num_steps,
        progress=display,
        report=report,
    )
    new = folder.with_name(f"{folder.name}.new")
    save_pretrained(model, new)
    if jax.process_index() == 0:
        tokenizer.save(str(new / "tokenizer.json"))
        config = json.loads((new / "config.json").read_text())
        config["eos_token_id"] = tokenizer.token_to_id(END)
        (new / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    coordination.Channel("experiment/tiny model").exchange("")  # it is there, for all


def train_tokenizer(text: str) -> Any:
    """A byte-level BPE tokenizer of a text, which knows every text.

    Raises:
        ModuleNotFoundError: tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "The tiny model requires the package tokenizers, which is not installed. Install it: "
            "pip install tokenizers"
        ) from missing
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer
