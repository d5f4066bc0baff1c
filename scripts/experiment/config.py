"""What a run of scripts/train.py may be asked for, and what of it may change when it goes on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from experiment import arguments, run_settings
from experiment.run_settings import RunSettings


@dataclass(frozen=True)
class ModelOptions:
    """The transformer (--task text)."""

    sequence_length: int = 128
    """Bytes the model sees at once."""
    num_layers: int = 4
    """Blocks, scanned over."""
    embed_dim: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Attention heads."""
    mlp_dim: int = 384
    """Hidden width of the MLPs."""
    gated: bool = True
    """Gate the MLPs."""
    remat: str = "none"
    """What the backward pass recomputes: none, full, dots or another policy of
    tpudist.models.parts.remat, such as save_qkv."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What to compute in; auto is bfloat16, but float32 on CPU, where it is faster."""


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW with clipped gradients; the learning rate warms up, then falls along a cosine."""

    learning_rate: float = 3e-3
    """The highest learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    clip_norm: float = 1.0
    """The largest norm of a gradient."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """What gradients travel in between replicas: bfloat16 is half the bytes, and rounds."""
    optimizer_memory: Literal["device", "pinned_host"] = "device"
    """Where the optimizer's state lives between steps: pinned_host is the host's memory, which
    lowers the peak within a step where activations, not the state, make it."""


@dataclass(frozen=True)
class Config:
    """Trains a small model on real data, with any tpudist strategy."""

    task: Literal["text", "digits"] = "text"
    """Bytes of text for a transformer, or scikit-learn's handwritten digits for a convnet."""
    steps: int = 400
    """Training steps."""
    batch_size: int | None = None
    """Examples in a global batch, all replicas together. By default 16 windows of text, or 128
    digits: BatchNorm takes its statistics from one replica's part of them."""
    seed: int = 0
    """Decides the initial weights and the order of the data."""
    data: str | None = None
    """Glob of text files to learn instead of the standard library, as 'books/**/*.txt'."""
    out: Path = Path("runs/latest")
    """Folder for checkpoints, metrics, TensorBoard events, curves and the summary."""
    held_out_windows: int = 512
    """At most so many windows of held-out text are judged (--task text)."""
    prompt: str | None = None
    """What the text written at the end goes on from."""
    sample_bytes: int = 240
    """Length of that text; 0 for none."""
    model: ModelOptions = field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    run: RunSettings = field(default_factory=RunSettings)


MAY_CHANGE = run_settings.MAY_CHANGE | {
    *("remat", "optimizer_memory", "out", "prompt", "sample_bytes"),
    *("steps", "data"),  # judged by more than their values: see folder.begin and digest
}
"""Options that may be others when a run goes on; any other one would make it another run."""


def facts(config: Config, digest: str) -> dict[str, Any]:
    """What the numbers of a run depend on, by option: must not change when it goes on.

    Args:
        config: What was asked for.
        digest: Tells the data from others.
    """
    options = dataclasses.asdict(config)
    options |= options.pop("model") | options.pop("optimizer") | options.pop("run")
    kept = {name: value for name, value in options.items() if name not in MAY_CHANGE}
    return {f"--{name.replace('_', '-')}": value for name, value in kept.items()} | {
        "the training and held-out data": digest
    }


def check(config: Config) -> dict[str, int]:
    """Refuses what cannot work, before anything else is done; returns the axes inside a replica."""
    axes = run_settings.check(config.run)
    arguments.check_positive(
        {
            "steps": config.steps,
            "batch-size": config.batch_size or 0,
            "held-out-windows": config.held_out_windows,
            "sequence-length": config.model.sequence_length,
            "learning-rate": config.optimizer.learning_rate,
            "clip-norm": config.optimizer.clip_norm,
        }
    )
    arguments.check_not_negative(
        {
            "seed": config.seed,
            "sample-bytes": config.sample_bytes,
            "weight-decay": config.optimizer.weight_decay,
        }
    )
    if config.data is not None and config.task != "text":
        raise ValueError(
            f"--data was given with --task {config.task}, which has data of its own. Drop it."
        )
    arguments.check_folder(config.out)
    return axes
