"""Options of scripts/finetune.py, and which of them may change when a run resumes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from experiment import arguments, run_settings
from experiment.run_settings import RunSettings


@dataclass(frozen=True)
class FinetuneConfig:
    """Fine-tunes a pretrained language model on your text, with any tpudist strategy."""

    model: Path | None = None
    """Folder of a model that tpudist.models.load_pretrained can read: config.json, safetensors and
    tokenizer.json. By default the script first creates a tiny model."""
    text: tuple[Path, ...] = ()
    """Text files, or folders of text files. The default is the topics of Python's help()."""
    lora: int = 0
    """Rank of low-rank adapters to train instead of all weights; 0 trains all weights."""
    lora_alpha: float = 16.0
    """Scale of the adapters: their output is multiplied by this divided by their rank."""
    steps: int = 150
    """Number of training steps."""
    batch_size: int = 16
    """Number of windows of text in a global batch, over all replicas."""
    sequence_length: int = 128
    """Length of a window, in tokens."""
    learning_rate: float = 1e-3
    """Highest learning rate. Large models need less: about 1e-5 for all weights, 2e-4 for
    adapters."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip_norm: float = 1.0
    """Largest norm of the gradients; larger gradients are scaled down."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the computation; auto is float32 on CPUs and bfloat16 elsewhere. Trained weights are
    float32. With --lora, the other weights keep the dtype of their files."""
    remat: str = "none"
    """Activations that the backward pass recomputes: none, full, dots or another policy of
    tpudist.models.parts.remat."""
    seed: int = 0
    """Seed of the order of the data and of the initial adapters."""
    out: Path = Path("runs/finetune")
    """Folder for checkpoints, metrics, TensorBoard events, curves and the summary. Its folder
    model/ has the trained weights (adapters merged), the configuration and the tokenizer."""
    held_out_windows: int = 128
    """Maximum number of held-out windows to evaluate."""
    prompt: str | None = None
    """Beginning of the sample texts before and after training. The default is held-out text."""
    sample_tokens: int = 60
    """Length of a sample text, in tokens; 0 for no samples."""
    run: RunSettings = field(default_factory=RunSettings)


MAY_CHANGE = run_settings.MAY_CHANGE | {
    *("remat", "out", "prompt", "sample_tokens"),
    *("steps", "text", "model"),  # judged by more than their values: see folder.begin and digests
}
"""Options that may change when a run resumes; a change of any other one raises an error."""


def facts(config: FinetuneConfig, text_digest: str, model_digest: str) -> dict[str, Any]:
    """Returns the options that a run's numbers depend on: they must not change when it resumes."""
    options = dataclasses.asdict(config)
    options |= options.pop("run")
    kept = {name: value for name, value in options.items() if name not in MAY_CHANGE}
    return {f"--{name.replace('_', '-')}": value for name, value in kept.items()} | {
        "the training and held-out text": text_digest,
        "the model": model_digest,
    }


def check(config: FinetuneConfig) -> dict[str, int]:
    """Checks the options before any work begins; returns the axes inside a replica."""
    axes = run_settings.check(config.run)
    arguments.check_positive(
        {
            "steps": config.steps,
            "batch-size": config.batch_size,
            "sequence-length": config.sequence_length,
            "held-out-windows": config.held_out_windows,
            "learning-rate": config.learning_rate,
            "clip-norm": config.clip_norm,
            "lora-alpha": config.lora_alpha,
        }
    )
    arguments.check_not_negative(
        {
            "lora": config.lora,
            "seed": config.seed,
            "sample-tokens": config.sample_tokens,
            "weight-decay": config.weight_decay,
        }
    )
    if not config.lora and config.lora_alpha != FinetuneConfig.lora_alpha:
        raise ValueError(
            f"--lora-alpha {config.lora_alpha} requires adapters, but --lora is 0. Add --lora "
            f"RANK, or omit --lora-alpha."
        )
    if config.prompt == "":
        raise ValueError("--prompt is empty. Use at least one word, or omit --prompt.")
    arguments.check_folder(config.out)
    return axes
