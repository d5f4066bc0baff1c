"""The optimizer of scripts/train.py, and its learning rate, which the length of a run decides."""

from __future__ import annotations

import optax

from experiment.config import OptimizerOptions


def warmup_cosine(learning_rate: float, num_steps: int) -> optax.Schedule:
    """The learning rate of each step: up over the first 20th of the run, then down to a 20th."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=max(1, num_steps // 20),
        decay_steps=max(2, num_steps),
        end_value=learning_rate / 20,
    )


def adamw_with_clipping(options: OptimizerOptions, num_steps: int) -> optax.GradientTransformation:
    """AdamW for a run of `num_steps` steps; `options` is any object with the fields used here."""
    schedule = warmup_cosine(options.learning_rate, num_steps)
    return optax.chain(
        optax.clip_by_global_norm(options.clip_norm),
        optax.adamw(schedule, b2=0.95, weight_decay=options.weight_decay),
    )
