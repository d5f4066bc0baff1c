"""What a run of scripts/finetune.py may be asked for, and what may change when it goes on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from experiment import arguments, run_settings
from experiment.run_settings import RunSettings


@dataclass(frozen=True)
class FinetuneConfig:
    """Fine-tunes a pretrained language model on text of yours, with any tpudist strategy."""

    model: Path | None = None
    """Folder of the model: config.json, safetensors and tokenizer.json, of the families that
    tpudist.models.load_pretrained knows. By default a tiny one, which is made first."""
    text: tuple[Path, ...] = ()
    """Files of text, or folders of them. By default what Python's help() says of its language."""
    lora: int = 0
    """Rank of low-rank adapters to train in the place of all weights; 0 trains all weights."""
    lora_alpha: float = 16.0
    """What the adapters add is multiplied by this over their rank."""
    steps: int = 150
    """Training steps."""
    batch_size: int = 16
    """Windows of text in a global batch, all replicas together."""
    sequence_length: int = 128
    """Tokens the model sees at once."""
    learning_rate: float = 1e-3
    """The highest learning rate. Large models take less: about 1e-5 for all weights, 2e-4 for
    adapters."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip_norm: float = 1.0
    """The largest norm of a gradient."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What to compute in; auto is bfloat16, but float32 on CPU. Weights that are trained are
    float32, those that adapters stand beside keep the dtype of their files."""
    remat: str = "none"
    """What the backward pass recomputes: none, full, dots or another policy of
    tpudist.models.parts.remat."""
    seed: int = 0
    """Decides the order of the data, and the first values of adapters."""
    out: Path = Path("runs/finetune")
    """Folder for checkpoints, metrics, TensorBoard events, curves, the summary, and in model/ the
    weights that come of it, adapters merged, with its configuration and tokenizer."""
    held_out_windows: int = 128
    """At most so many windows of held-out text are judged."""
    prompt: str | None = None
    """What the texts written before and after go on from; by default a held-out beginning."""
    sample_tokens: int = 60
    """Length of these texts; 0 for none."""
    run: RunSettings = field(default_factory=RunSettings)


MAY_CHANGE = run_settings.MAY_CHANGE | {
    *("remat", "out", "prompt", "sample_tokens"),
    *("steps", "text", "model"),  # judged by more than their values: see folder.begin and digests
}
"""Options that may be others when a run goes on; any other one would make it another run."""


def facts(config: FinetuneConfig, text_digest: str, model_digest: str) -> dict[str, Any]:
    """What the numbers of a run depend on, by option: must not change when it goes on."""
    options = dataclasses.asdict(config)
    options |= options.pop("run")
    kept = {name: value for name, value in options.items() if name not in MAY_CHANGE}
    return {f"--{name.replace('_', '-')}": value for name, value in kept.items()} | {
        "the training and held-out text": text_digest,
        "the model": model_digest,
    }


def check(config: FinetuneConfig) -> dict[str, int]:
    """Refuses what cannot work, before anything else is done; returns the axes inside a replica."""
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
            f"--lora-alpha {config.lora_alpha} was given without adapters, which it multiplies. "
            f"Give --lora RANK too, or leave it out."
        )
    if config.prompt == "":
        raise ValueError("--prompt is empty. Give it a word at least, or leave it out.")
    arguments.check_folder(config.out)
    return axes
