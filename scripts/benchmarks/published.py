"""The planner's estimates for training runs whose speed others have published.

The model of each row is the reference transformer in the sizes that were published, its step that
of scripts/train.py with AdamW; slice, layout, batch and length are as published.
Nothing of the pricing is fitted to a row: its rules stand in
`tpudist.xla.estimate.instruction_time` and `tpudist.xla.hardware.links`, its chip facts in
`tpudist.xla.hardware.chips`.

Where a publication gives FLOP/s instead of a time, the time follows from the FLOPs as MaxText
counted them then (`calculate_tflops_training_per_device`; full attention, not half of it for the
causal mask): 6 per parameter and token, without the embedding table, and 12 per layer, head dim
and pair of positions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpudist
from benchmarks.figures import Figure, at_most
from tpudist.models import Transformer, TransformerConfig, next_token_nats
from tpudist.models.presets import PRESETS
from tpudist.planner import GlobalBatch, Plan
from tpudist.training.steps import make_train_step

SUITE = "published runs"
TOLERANCE = 0.15
_MAXTEXT = "github.com/AI-Hypercomputer/maxtext: configs/tpu/{}/README.md and {}b.sh"
_RECIPE = "github.com/AI-Hypercomputer/tpu-recipes: training/{}"


@dataclass(frozen=True)
class Run:
    """One published training run."""

    name: str
    source: str
    topology: str
    replica_axes: Mapping[str, int]
    config: TransformerConfig
    batch_per_chip: int
    length: int
    step_s: float | None = None
    """Seconds of a step, if those were published."""
    flops_per_s: float | None = None
    """Else FLOP/s per chip."""
    rules: tuple[tuple[str, str], ...] = ()
    """Logical-axis rules of the run."""
    max_hbm_bytes: float | None = None
    """The memory per chip that another program of this run was seen to need."""

    @property
    def published_s(self) -> float:
        """Seconds of a step as published."""
        if self.step_s is not None:
            return self.step_s
        assert self.flops_per_s is not None
        return flops_per_chip(self.config, self.batch_per_chip, self.length) / self.flops_per_s


def flops_per_chip(config: TransformerConfig, batch: int, length: int) -> float:
    """FLOPs of a step on each chip as MaxText counted them; see above."""
    width, embed = config.head_dim, config.embed_dim
    heads = 2 * config.num_heads + 2 * (config.num_kv_heads or config.num_heads)
    per_layer = embed * width * heads + (3 if config.gated else 2) * embed * config.mlp_dim
    parameters = config.num_layers * per_layer + config.vocabulary * embed
    attention = 12 * config.num_layers * config.num_heads * width * length**2
    return batch * (6.0 * parameters * length + attention)


def _config(preset: str, **options: Any) -> TransformerConfig:
    return dataclasses.replace(PRESETS[preset].config, **options)


# As in MaxText, unless a recipe sets `sa_use_fused_bwd_kernel`.
_TWO_KERNELS = {"splash_fused_backward": False}
_16B = _config("dense-16b", **_TWO_KERNELS)
_32B = _config("dense-32b", **_TWO_KERNELS)
_64B = _config("dense-32b", num_layers=64, **_TWO_KERNELS)
# MaxText's recipes for v6e set all blocks of the kernel to 2048. The compiler takes more than five
# minutes for such a tile. With 1024 instead of 512, the kernel is a third faster (apple/axlearn,
# pull request 958).
_V6E_BLOCKS = {"splash_block": 1024, "splash_backward_block": 2048}
_LLAMA_8B = _config("llama-3.1-8b", remat="offload_projections", **_V6E_BLOCKS)
_LLAMA_70B = _config("llama-3.1-70b", remat="save:query,key,value,attention")
_MISTRAL_7B = _config("mistral-7b", remat="offload_projections", **_V6E_BLOCKS)

RUNS: dict[str, Run] = {
    run.name: run
    for run in (
        Run(
            "16B, v5e-256",
            _MAXTEXT.format("v5e", 16),
            "v5e-256",
            {"fsdp": 256},
            _16B,
            6,
            2048,
            flops_per_s=120e12,
            max_hbm_bytes=9.2e9,
        ),
        Run(
            "32B, v5e-256",
            _MAXTEXT.format("v5e", 32),
            "v5e-256",
            {"fsdp": 256},
            _32B,
            4,
            2048,
            flops_per_s=132e12,
        ),
        Run(
            "64B, v5e-256",
            _MAXTEXT.format("v5e", 64),
            "v5e-256",
            {"fsdp": 256},
            _64B,
            2,
            2048,
            flops_per_s=118e12,
        ),
        Run(
            "16B, 2 x v5e-256",
            _MAXTEXT.format("v5e", 16),
            "2xv5e-256",
            {"fsdp": 256},
            _16B,
            6,
            2048,
            flops_per_s=117e12,
        ),
        Run(
            "32B, v5p-128",
            _MAXTEXT.format("v5p", 32),
            "v5p-128",
            {"fsdp": 16, "tensor": 4},
            _config("dense-32b", remat="minimal", **_TWO_KERNELS),
            6,
            2048,
            flops_per_s=328e12,
            rules=(("residual", "tensor"),),
        ),
        Run(
            "Llama-3.1-8B, v6e-8",
            _RECIPE.format("trillium/Llama3.1-8B-MaxText/v6e-8"),
            "v6e-8",
            {"fsdp": 8},
            _LLAMA_8B,
            3,
            8192,
            step_s=3.443,
        ),
        Run(
            "Llama-3.1-8B, v6e-256",
            _RECIPE.format("trillium/Llama3.1-8B-MaxText/v6e-256"),
            "v6e-256",
            {"fsdp": 256},
            _LLAMA_8B,
            4,
            8192,
            step_s=4.546,
        ),
        Run(
            "Mistral-7B, v6e-8",
            _RECIPE.format("trillium/Mistral-7B-MaxText"),
            "v6e-8",
            {"fsdp": 8},
            _MISTRAL_7B,
            6,
            8192,
            step_s=6.320,
        ),
        Run(
            "Llama-3.1-70B, tpu7x, 64 chips",
            _RECIPE.format("ironwood/llama3.1-70b/8k-bf16-tpu7x-4x4x4"),
            "tpu7x-128",
            {"fsdp": 128},
            _LLAMA_70B,
            4,
            8192,
            step_s=12.20,
        ),
    )
}


def plan(run: Run, **options: Any) -> Plan:
    """The planner's estimate for a run."""
    strategy = tpudist.TPUStrategy(
        replica_axes=run.replica_axes,
        logical_axis_rules=run.rules,
        devices=tpudist.planner.devices(run.topology),
    )
    model = strategy.create_abstract(lambda: Transformer(run.config, rngs=nnx.Rngs(0)))
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-4, 100, 1000))
    optimizer = strategy.create_abstract(lambda model: tpudist.Optimizer(tx, model), model)
    num_chips = tpudist.planner.parse_topology(run.topology).num_chips
    batch = jax.ShapeDtypeStruct((run.batch_per_chip * num_chips, run.length + 1), jnp.int32)
    step = make_train_step(lambda model, tokens: next_token_nats(model, tokens).mean(axis=-1))
    return strategy.plan(
        step,
        args=(model, optimizer, GlobalBatch(batch)),
        tokens_per_step=batch.shape[0] * run.length,
        model_flops=num_chips * flops_per_chip(run.config, run.batch_per_chip, run.length),
        **options,
    )


def figures(names: tuple[str, ...] = ()) -> Iterator[Figure]:
    """Estimated against published seconds of each run, and the median of the errors."""
    errors = []
    for run in RUNS.values():
        if names and run.name not in names:
            continue
        planned = plan(run)
        details = json.loads(planned.to_json())
        if planned.time is None or planned.memory is None:
            yield Figure(SUITE, run.name, "fits", 0, 1, "1", False, details=details)
            continue
        estimate, published = planned.time.step_s, run.published_s
        errors.append(abs(estimate / published - 1))
        yield Figure(SUITE, run.name, "step time, s", estimate, published, details=details)
        peak = Figure(SUITE, run.name, "HBM, GB per chip", planned.memory.peak_bytes / 1e9, None)
        yield peak if run.max_hbm_bytes is None else at_most(peak, run.max_hbm_bytes / 1e9)
    if errors:
        median = Figure(SUITE, "all", "median error", float(np.median(errors)), None)
        yield at_most(median, TOLERANCE)
