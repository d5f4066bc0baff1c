"""Options of scripts/train.py, and which of them may change when a run resumes."""

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
    """Length of a window, in bytes."""
    num_layers: int = 4
    """Number of transformer blocks."""
    embed_dim: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Number of attention heads."""
    mlp_dim: int = 384
    """Hidden width of the MLPs."""
    gated: bool = True
    """Whether the MLPs are gated."""
    remat: str = "none"
    """Activations that the backward pass recomputes: none, full, dots or another policy of
    tpudist.models.parts.remat, such as save_qkv."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the computation; auto is float32 on CPUs, where it is faster, and bfloat16
    elsewhere."""


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW with clipped gradients; the learning rate warms up, then falls along a cosine."""

    learning_rate: float = 3e-3
    """Highest learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    clip_norm: float = 1.0
    """Largest norm of the gradients; larger gradients are scaled down."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gradients sent between replicas; bfloat16 halves the bytes, but rounds."""
    optimizer_memory: Literal["device", "pinned_host"] = "device"
    """Memory of the optimizer's state between steps. pinned_host is the host's memory; it lowers
    the peak memory of a step if activations cause the peak."""


@dataclass(frozen=True)
class Config:
    """Trains a small model on real data, with any tpudist strategy."""

    task: Literal["text", "digits"] = "text"
    """text: a transformer on bytes of text; digits: a convnet on scikit-learn's digits."""
    steps: int = 400
    """Number of training steps."""
    batch_size: int | None = None
    """Number of examples in a global batch, over all replicas. The default is 16 windows of text,
    or 128 digits, because BatchNorm uses the statistics of one replica's examples."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    data: str | None = None
    """Glob of text files to train on, such as 'books/**/*.txt'. The default is the standard
    library."""
    out: Path = Path("runs/latest")
    """Folder for checkpoints, metrics, TensorBoard events, curves and the summary."""
    held_out_windows: int = 512
    """Maximum number of held-out windows to evaluate (--task text)."""
    prompt: str | None = None
    """Beginning of the sample text that the model continues at the end (--task text)."""
    sample_bytes: int = 240
    """Length of the sample text, in bytes; 0 for no sample."""
    model: ModelOptions = field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    run: RunSettings = field(default_factory=RunSettings)


MAY_CHANGE = run_settings.MAY_CHANGE | {
    *("remat", "optimizer_memory", "out", "prompt", "sample_bytes"),
    *("steps", "data"),  # judged by more than their values: see folder.begin and digest
}
"""Options that may change when a run resumes; a change of any other one raises an error."""


def facts(config: Config, digest: str) -> dict[str, Any]:
    """Returns the options that a run's numbers depend on: they must not change when it resumes.

    Args:
        config: Options of the run.
        digest: Digest of the data.
    """
    options = dataclasses.asdict(config)
    options |= options.pop("model") | options.pop("optimizer") | options.pop("run")
    kept = {name: value for name, value in options.items() if name not in MAY_CHANGE}
    return {f"--{name.replace('_', '-')}": value for name, value in kept.items()} | {
        "the training and held-out data": digest
    }


def check(config: Config) -> dict[str, int]:
    """Checks the options before any work begins; returns the axes inside a replica."""
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
            f"--data applies only to --task text, not to --task {config.task}. Omit --data."
        )
    arguments.check_folder(config.out)
    return axes
