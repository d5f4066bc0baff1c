"""Trains the reference transformer for a few steps: one program for all geometries."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import tpudist
from tpudist.models import Transformer, TransformerConfig, next_token_loss
from tpudist.planner import GlobalBatch
from tpudist.training.steps import make_train_step

CONFIG = TransformerConfig(num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64, dtype="float32")
GLOBAL_BATCH = 16
LENGTH = 33


@dataclasses.dataclass(frozen=True)
class Setup:
    """Options of training that do not change the loss, except `experts`.

    Attributes:
        changes: Changes of the transformer's configuration.
        experts: Whether it has experts, with room for every token.
        annotated: Whether its parameters name their dims.
        microbatches: Parts of a replica's batch.
        reduce_dtype: Dtype of the reduced gradients.
        memory_kind: Memory of the optimizer's state.
    """

    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    experts: bool = False
    annotated: bool = True
    microbatches: int = 1
    reduce_dtype: str | None = None
    memory_kind: str | None = None

    @property
    def config(self) -> TransformerConfig:
        """Configuration of the model."""
        more = {"num_experts": 4, "expert_capacity": 4.0} if self.experts else {}
        return dataclasses.replace(CONFIG, **more, **self.changes)


def batches(num_steps: int) -> list[np.ndarray]:
    """Bytes that can be learned; the last batch of each four is partial."""
    rng = np.random.default_rng(0)
    text = rng.integers(97, 105, size=(8, LENGTH))
    made = []
    for step in range(num_steps):
        rows = GLOBAL_BATCH - 5 if step % 4 == 3 else GLOBAL_BATCH
        made.append(text[rng.integers(8, size=rows)].astype(np.uint8))
    return made


def train_step(setup: Setup):
    """Written once, for one replica."""
    return make_train_step(
        lambda model, tokens: next_token_loss(model, tokens).mean(axis=-1), setup.microbatches
    )


def make_state(strategy, setup: Setup, create: str = "create"):
    """The model and the optimizer, made by a method of the strategy."""

    def make_model():
        model = Transformer(setup.config, rngs=nnx.Rngs(0))
        if not setup.annotated:
            for _, variable in nnx.iter_graph(model):
                if isinstance(variable, nnx.Param):
                    variable.set_metadata(out_sharding=None)
        return model

    model = getattr(strategy, create)(make_model)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, b2=0.95))
    optimizer = getattr(strategy, create)(
        lambda model: tpudist.Optimizer(tx, model, reduce_dtype=setup.reduce_dtype),
        model,
        memory_kind=setup.memory_kind,
    )
    return model, optimizer


def train(
    strategy, num_steps: int = 20, setup: Setup | None = None
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The loss of each step, and the final weights (whole) by path."""
    steps = list(train_stepwise(strategy, num_steps, setup or Setup()))
    return [float(loss) for loss, _ in steps], weights_of(strategy, steps[-1][1])


def train_stepwise(
    strategy, num_steps: int, setup: Setup
) -> Iterator[tuple[jax.Array, nnx.Module]]:
    """The loss of each step, and the model after it."""
    model, optimizer = make_state(strategy, setup)
    step = train_step(setup)
    for batch in strategy.experimental_distribute_dataset(batches(num_steps)):
        yield strategy.run(step, args=(model, optimizer, batch)), model


def weights_of(strategy, model) -> dict[str, np.ndarray]:
    """A copy of each parameter as a whole array, by path."""
    return {
        ".".join(map(str, path)): np.array(strategy.replicate(value.get_raw_value()))
        for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def abstract_args(strategy, setup: Setup):
    """Abstract arguments of the step: the model, the optimizer and a global batch."""
    batch = jax.ShapeDtypeStruct((GLOBAL_BATCH, LENGTH), np.uint8)
    return *make_state(strategy, setup, "create_abstract"), GlobalBatch(batch)
