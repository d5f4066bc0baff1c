"""Layers that a loop could compute are found, and nothing else is."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import tpudist
from tpudist.lowering import alike_layers
from tpudist.run import compile_hints

DIM, DEPTH = 4, 8
X = jnp.ones((3, DIM))


class Block(nnx.Module):
    def __init__(self, rngs, dim=DIM):
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.wide = nnx.Linear(DIM, dim, rngs=rngs)
        self.narrow = nnx.Linear(dim, DIM, rngs=rngs)

    def __call__(self, x):
        return x + self.narrow(nnx.gelu(self.wide(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, depth=DEPTH, dims=None):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(DIM, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, dim) for dim in dims or [DIM] * depth])
        self.last = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def count(function, *args):
    layers = alike_layers.find(jax.make_jaxpr(function)(*args))
    return None if layers is None else layers.count


def train(model, call=lambda model, x: model(x)):
    """Returns a step with gradients and Adam, and its arguments."""
    graphdef, state = nnx.split(model)
    tx = optax.adam(1e-3)

    def step(state, slots, x):
        def loss(state):
            return jnp.square(call(nnx.merge(graphdef, state), x)).sum()

        gradients = jax.grad(loss)(state)
        updates, slots = tx.update(gradients, slots, state)
        return optax.apply_updates(state, updates), slots

    return step, state, tx.init(state), X


@pytest.mark.parametrize("depth", [6, 9, 16])
def test_the_layers_of_a_training_step_are_counted(depth):
    assert count(*train(Model(depth))) == depth


def test_layers_under_remat_and_jit_are_counted():
    def call(model, x):
        x = model.first(x)
        for block in model.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return model.last(x)

    assert count(*train(Model(), call)) == DEPTH
    graphdef, state = nnx.split(Model())
    assert count(jax.jit(lambda state: nnx.merge(graphdef, state)(X)), state) == DEPTH


def test_layers_of_linen_are_counted():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(DIM)(x)
            for _ in range(DEPTH):
                x = x + nn.Dense(DIM)(nn.LayerNorm()(x))
            return x

    variables = Layers().init(jax.random.key(0), X)
    assert count(jax.grad(lambda v: Layers().apply(v, X).sum()), variables) == DEPTH


def shared_weights(w, x):
    for _ in range(DEPTH):
        x = jnp.tanh(x @ w)
    return x


def parallel_heads(weights, x):
    return sum(jnp.tanh(x @ w) for w in weights)


def skips(weights, x):
    """The second half of the layers also reads the first half, as in a U-Net."""
    kept = []
    for w in weights:
        x = jnp.tanh(x @ w)
        kept.append(x)
    for w in weights:
        x = jnp.tanh(x @ w) + kept.pop()
    return x


def numbered(weights, x):
    """A number of each layer is part of the program."""
    for i, w in enumerate(weights):
        x = jnp.tanh(x @ w) * (1.5 + i)
    return x


def pairs_share_weights(weights, x):
    for i in range(DEPTH):
        x = jnp.tanh(x @ weights[i // 2])
    return x


WEIGHTS = [jnp.eye(DIM)] * DEPTH


@pytest.mark.parametrize(
    ("function", "weights"),
    [
        (shared_weights, jnp.eye(DIM)),
        (parallel_heads, WEIGHTS),
        (numbered, WEIGHTS),
        (pairs_share_weights, WEIGHTS),
    ],
)
def test_repetitions_that_one_loop_cannot_compute_are_not_found(function, weights):
    assert count(function, weights, X) is None
    assert count(jax.grad(lambda w, x: function(w, x).sum()), weights, X) is None


def test_only_the_layers_without_skips_are_counted():
    assert count(skips, WEIGHTS, X) == DEPTH


def test_layers_of_different_sizes_and_few_layers_are_not_found():
    assert count(*train(Model(dims=[2, 3, 4, 5, 6, 7, 8, 9]))) is None
    assert count(*train(Model(depth=4))) is None


def test_a_model_that_scans_its_layers_has_none():
    weights = jnp.stack(WEIGHTS)

    def scanned(weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), X, weights)[0].sum()

    assert count(jax.grad(scanned), weights) is None


@pytest.fixture
def hints(caplog, monkeypatch):
    monkeypatch.setattr(compile_hints, "_hinted", set())
    caplog.set_level(logging.INFO, logger="tpudist.compile")
    return lambda: [x.getMessage() for x in caplog.records if "alike layers" in x.getMessage()]


def test_a_slow_compile_suggests_a_loop_once(hints, monkeypatch):
    monkeypatch.setattr(compile_hints, "SLOW_S", 0.0)
    strategy = tpudist.MirroredStrategy()
    model = strategy.create(Model)

    def predict(model, x):
        return model(x)

    for rows in (2, 3):
        strategy.run(predict, args=(model, jnp.ones((rows, DIM))))
    [hint] = hints()
    assert hint.startswith("predict has 8 alike layers of ")
    assert "nnx.scan (Flax NNX), nn.scan (Linen)" in hint


def test_a_fast_compile_suggests_nothing(hints):
    strategy = tpudist.MirroredStrategy()
    model = strategy.create(Model)
    strategy.run(lambda model, x: model(x), args=(model, X))
    assert hints() == []
