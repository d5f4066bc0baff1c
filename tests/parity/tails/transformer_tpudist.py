"""A small language model: layers of attention, the mean of the losses of all tokens."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import tpudist

from . import data
from .runs import parts

WIDTH, NUM_HEADS, NUM_LAYERS = 8, 2, 2
SHAPES = {
    "query": (8, 8),
    "key": (8, 8),
    "value": (8, 8),
    "out": (8, 8),
    "up": (8, 16),
    "down": (16, 8),
}


def normalize(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        p = {
            n: self.param(n, lambda _, n=n: jnp.asarray(data.weights(n, *SHAPES[n])))
            for n in SHAPES
        }
        h = normalize(x)
        shape = (*h.shape[:2], NUM_HEADS, WIDTH // NUM_HEADS)
        q, k, v = ((h @ p[n]).reshape(shape) for n in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
        causal = jnp.tril(jnp.ones((data.NUM_STEPS, data.NUM_STEPS))) > 0
        attention = nn.softmax(jnp.where(causal, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", attention, v)
        x = x + mixed.reshape(x.shape) @ p["out"]
        h = nn.Dropout(0.0, deterministic=False)(normalize(x))
        return x + nn.relu(h @ p["up"]) @ p["down"], None


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = self.param(
            "embed", lambda _: jnp.asarray(data.weights("embed", data.NUM_TOKENS, WIDTH))
        )
        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=NUM_LAYERS,
        )
        x, _ = layers(name="layers")(embed[tokens], None)
        return normalize(x) @ embed.T


def program(strategy, global_batch):
    model, optimizer = Transformer(), optax.sgd(0.1, momentum=0.9)

    def replica_step(params, opt_state, tokens):
        def loss_fn(params):
            rngs = {"dropout": jax.random.key(0)}
            logits = model.apply({"params": params}, tokens[:, :-1], rngs=rngs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return jnp.mean(losses)

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        context = tpudist.get_replica_context()
        gradients = context.all_reduce(tpudist.ReduceOp.MEAN, gradients)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    @tpudist.function
    def train_step(params, opt_state, batch):
        params, opt_state, loss = strategy.run(replica_step, args=(params, opt_state, *batch))
        mean = strategy.reduce(tpudist.ReduceOp.MEAN, loss, axis=None)
        return params, opt_state, loss, mean

    def run(dataset):
        params = {
            "embed": jnp.asarray(data.weights("embed", data.NUM_TOKENS, WIDTH)),
            "layers": {n: jnp.asarray(data.weights(n, NUM_LAYERS, *s)) for n, s in SHAPES.items()},
        }
        opt_state = optimizer.init(params)
        losses, means = [], []
        for _ in range(2):
            for batch in dataset:
                params, opt_state, loss, mean = train_step(params, opt_state, batch)
                losses.append(parts(strategy, loss))
                means.append(float(mean))
        flat = {"embed": params["embed"], **params["layers"]}
        return {
            "losses": losses,
            "reduced": means,
            "params": {n: data.summary(v) for n, v in sorted(flat.items())},
        }

    return run
