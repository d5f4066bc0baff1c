"""The estimates without the compiler against compiled plans: every candidate of small models.

For each model, all candidates are compiled for a v5e-8 (an exhaustive search), up to machine code,
which takes minutes for each and does not change its collectives, memory and operations. The figures
are the rank correlation of the estimates with the compiled times, and the time of the best of the
most promising tenth over the best of all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpudist
from benchmarks.figures import Figure, at_least_times, at_most
from tpudist.models import next_token_loss
from tpudist.models.parts.logical import axes
from tpudist.models.presets import make_transformer
from tpudist.models.transformer_config import TransformerConfig
from tpudist.planner import Candidate, GlobalBatch
from tpudist.planner.layouts.search_outcomes import FITS, Outcome, promise
from tpudist.training.steps import make_train_step

SUITE = "ranking"
SLICE = "v5e-8"
_MIN_CORRELATION = 0.8
_MAX_REGRET = 1.05
_LLAMA = TransformerConfig(
    vocabulary=32_000,
    num_layers=8,
    embed_dim=2048,
    num_heads=16,
    num_kv_heads=8,
    mlp_dim=7168,
    dtype="bfloat16",
    loss_chunk=512,
)
_GPT2_MEDIUM = TransformerConfig(
    vocabulary=50_304,
    num_layers=24,
    embed_dim=1024,
    num_heads=16,
    mlp_dim=4096,
    dtype="bfloat16",
    gated=False,
    tied=True,
    norm="layer",
    learned_positions=1024,
    biased=True,
    biased_outputs=True,
    biased_mlp=True,
    attention="dot_product",
)
_SMALL = dataclasses.replace(_LLAMA, num_layers=4, embed_dim=1024, num_heads=8)
_EXPERTS = dataclasses.replace(_SMALL, num_kv_heads=4, mlp_dim=2816, num_experts=8, loss_chunk=None)
_LONG = dataclasses.replace(_SMALL, num_kv_heads=2, mlp_dim=4096, loss_chunk=2048)


class _Residual(nnx.Module):
    def __init__(self, inputs: int, channels: int, stride: int, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs, dtype=jnp.bfloat16)
        self.first = conv(inputs, channels, (3, 3), strides=stride)
        self.second = conv(channels, channels, (3, 3))
        self.skip = conv(inputs, channels, (1, 1), strides=stride)
        self.norms = nnx.List([nnx.BatchNorm(channels, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(self.norms[0](self.first(x)))
        return jax.nn.relu(self.norms[1](self.second(y)) + self.skip(x))


class _ResNet(nnx.Module):
    """Unrolled residual blocks."""

    def __init__(self, rngs: nnx.Rngs):
        sizes = [(3, 64, 2), (64, 128, 2), (128, 256, 2), (256, 512, 2), (512, 512, 1)]
        self.blocks = nnx.List([_Residual(*size, rngs) for size in sizes])
        self.head = nnx.Linear(512, 1000, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((1, 2)))


class _Mixer(nnx.Module):
    """Unrolled blocks of an MLP over tokens and one over channels."""

    def __init__(self, rngs: nnx.Rngs, depth: int = 6, width: int = 2048, tokens: int = 256):
        def linear(inputs: int, outputs: int, names: tuple[str | None, str | None]) -> nnx.Linear:
            return nnx.Linear(
                inputs, outputs, rngs=rngs, dtype=jnp.bfloat16, kernel_metadata=axes(*names)
            )

        self.blocks = nnx.List(
            [
                nnx.List(
                    [
                        linear(tokens, 2 * tokens, (None, "embed")),
                        linear(2 * tokens, tokens, ("embed", None)),
                        linear(width, 4 * width, ("embed", "mlp")),
                        linear(4 * width, width, ("mlp", "embed")),
                    ]
                )
                for _ in range(depth)
            ]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for mix_in, mix_out, wide, narrow in self.blocks:
            x = x + jnp.swapaxes(mix_out(jax.nn.gelu(mix_in(jnp.swapaxes(x, 1, 2)))), 1, 2)
            x = x + narrow(jax.nn.gelu(wide(x)))
        return x


def _transformer(
    config: TransformerConfig, rows: int, length: int
) -> Callable[[Candidate], Sequence[Any]]:
    def make_step(candidate: Candidate) -> Sequence[Any]:
        own = dataclasses.replace(config, remat=candidate.remat)
        tokens = jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)
        step = make_train_step(
            lambda model, tokens: next_token_loss(model, tokens).mean(axis=-1),
            num_microbatches=candidate.microbatches,
        )
        return _finish(candidate, lambda: make_transformer(own), step, tokens)

    return make_step


def _images(make: Callable[[], nnx.Module], batch: Any) -> Callable[[Candidate], Sequence[Any]]:
    def make_step(candidate: Candidate) -> Sequence[Any]:
        def loss(model: Any, rows: jax.Array) -> jax.Array:
            call = nnx.remat(lambda m, x: m(x)) if candidate.remat == "full" else lambda m, x: m(x)
            outputs = call(model, rows).astype(jnp.float32)
            return jnp.square(outputs).mean(axis=tuple(range(1, outputs.ndim)))

        step = make_train_step(loss, num_microbatches=candidate.microbatches)
        return _finish(candidate, make, step, batch)

    return make_step


def _finish(
    candidate: Candidate, make: Callable[[], nnx.Module], step: Any, batch: Any
) -> Sequence[Any]:
    strategy = tpudist.TPUStrategy(replica_axes=candidate.replica_axes, devices=candidate.devices)
    model = strategy.create_abstract(make)
    optimizer = strategy.create_abstract(
        lambda model: tpudist.Optimizer(optax.adamw(1e-3), model), model
    )
    return strategy, step, (model, optimizer, GlobalBatch(batch))


_SPLITS = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (1, 8)]
_AXES = [
    {name: size for name, size in (("fsdp", fsdp), ("tensor", tensor)) if size > 1}
    for fsdp, tensor in _SPLITS
]
_IMAGES = jax.ShapeDtypeStruct((512, 224, 224, 3), jnp.bfloat16)
_PATCHES = jax.ShapeDtypeStruct((256, 256, 2048), jnp.bfloat16)
MODELS: dict[str, tuple[Callable[[Candidate], Sequence[Any]], dict[str, Any]]] = {
    "llama, 0.5B": (
        _transformer(_LLAMA, 32, 2048),
        {"remat": ["none", "full"], "microbatches": [1, 2]},
    ),
    "gpt2 medium": (_transformer(_GPT2_MEDIUM, 64, 1024), {"remat": ["none", "full"]}),
    "8 experts": (
        _transformer(_EXPERTS, 32, 2048),
        {"geometries": [*_AXES, {"expert": 8}, {"expert": 4}, {"expert": 2, "fsdp": 4}]},
    ),
    "long context": (
        _transformer(_LONG, 8, 16_384),
        {"geometries": [*_AXES[:6], {"sequence": 2, "fsdp": 4}, {"sequence": 4, "fsdp": 2}]},
    ),
    "residual network": (
        _images(lambda: _ResNet(nnx.Rngs(0)), _IMAGES),
        {"geometries": _AXES[:4], "remat": ["none"], "microbatches": [1, 2, 4]},
    ),
    "unrolled mixer": (_images(lambda: _Mixer(nnx.Rngs(0)), _PATCHES), {}),
}


def compare(name: str, cache: str | bool = True) -> tuple[list[Outcome], float, float]:
    """Returns the outcomes of all candidates, the correlation, and the regret."""
    make_step, options = MODELS[name]
    options = {"geometries": _AXES, "remat": ["none", "full"], **options}
    complete = tpudist.planner.search(
        make_step,
        SLICE,
        time_budget_s=86_400,
        cache=cache,
        progress=lambda *_: None,
        **options,
    )
    outcomes = sorted(complete.outcomes, key=lambda x: promise(x.candidate, x.estimate))
    fitting = [x for x in outcomes if x.status == FITS and x.step_s and x.estimate]
    both = [(x.estimate.step_s, x.step_s) for x in fitting if x.estimate and x.step_s]
    few = outcomes[: max(1, len(outcomes) // 10)]
    times = [x.step_s for x in few if x.status == FITS and x.step_s]
    regret = math.inf
    if times and complete.best and complete.best.step_s:
        regret = min(times) / complete.best.step_s
    return outcomes, rank_correlation(both), regret


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns Spearman's coefficient."""
    ranks = [np.argsort(np.argsort(column)) for column in np.array(pairs).T]
    return float(np.corrcoef(ranks).flat[1])


def figures(names: Sequence[str] = ()) -> Iterator[Figure]:
    """The correlation and the regret of each model."""
    for name in names or MODELS:
        _, correlation, regret = compare(name)
        yield at_least_times(
            Figure(SUITE, name, "rank correlation", correlation, 1.0), _MIN_CORRELATION
        )
        yield at_most(Figure(SUITE, name, "best of a tenth over best", regret, None), _MAX_REGRET)
