"""Keeping n layers of a program gives the operations of a program written with n layers."""

import collections
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from tpudist.xla.compiler.repeated_layers import RepeatedLayers

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def residual(x, w, i, key):
    return x + jax.nn.relu(x * w["scale"] @ w["up"]) @ w["down"]


def with_keys(x, w, i, key):
    keep = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - 0.01 * i, x.shape)
    return x + keep * (jnp.tanh(x @ w["up"]) @ w["down"]) / (i + 1)


def alternating(x, w, i, key):
    h = x @ w["up"]
    return x + (jnp.sin(h) if i % 3 == 2 else jnp.cos(h)) @ w["down"]


def with_checkpoint(x, w, i, key):
    return jax.checkpoint(lambda x, w: residual(x, w, 0, None))(x, w)


def with_jit(x, w, i, key):
    return jax.jit(lambda x, w: residual(x, w, 0, None))(x, w)


def with_scan(x, w, i, key):
    return jax.lax.scan(lambda x, _: (residual(x, w, 0, None), None), x, length=2)[0]


def lower(layer, num_layers, microbatches=1):
    layers = {f"layer_{i}": {"up": W, "down": W, "scale": X} for i in range(num_layers)}
    params = {"layers": layers, "head": W, "embedding": W}

    def loss(params, x, key):
        x = jnp.sin(x @ params["embedding"])
        for i in range(num_layers):
            x = layer(x, params["layers"][f"layer_{i}"], i, key)
        return jnp.mean((x @ params["head"]) ** 2)

    def step(params, state, x, key):
        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part, key)), None

        if microbatches == 1:
            gradients = jax.grad(loss)(params, x, key)
        else:
            zeros = jax.tree.map(jnp.zeros_like, params)
            gradients, _ = jax.lax.scan(add, zeros, jnp.stack([x] * microbatches))
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    args = params, jax.eval_shape(TX.init, params), X, jax.eval_shape(lambda: jax.random.key(0))
    return jax.jit(step, donate_argnums=(0, 1)).lower(*args)


def count(lowered, operations="dot|tanh|sine|cosine|while|sqrt|xor"):
    return collections.Counter(re.findall(rf"\b({operations})\(", lowered.as_text("hlo")))


@pytest.mark.parametrize(
    ("layer", "microbatches"),
    [
        (residual, 1),
        (residual, 2),
        (with_keys, 1),
        (alternating, 1),
        (with_jit, 1),
        pytest.param(with_checkpoint, 1, marks=pytest.mark.slow),
        pytest.param(with_scan, 1, marks=pytest.mark.slow),
    ],
)
def test_kept_layers_equal_a_smaller_program(layer, microbatches):
    period = 3 if layer is alternating else 1
    layers = RepeatedLayers(lower(layer, 10 * period, microbatches))
    assert layers.num_layers == 10
    # The optimizer is not in the loop over microbatches, so all of it stays.
    counted = {} if microbatches == 1 else {"operations": "dot|while"}
    for few in (4, 6):
        kept, written = layers.keep(few), lower(layer, few * period, microbatches)
        assert count(kept, **counted) == count(written, **counted)
    kept.compile()


def test_programs_without_repeated_layers():
    def narrowing(x, w, i, key):
        return x[:, : 8 - i % 7] @ w["up"][: 8 - i % 7]

    assert RepeatedLayers(lower(residual, 7)).num_layers == 0
    assert RepeatedLayers(lower(narrowing, 12)).num_layers == 0
