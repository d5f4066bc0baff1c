"""A contrastive loss between two views: every row against every other row of the replica."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpudist

from . import data
from .runs import parts


class Encoder(nnx.Module):
    def __init__(self):
        self.w1 = nnx.Param(jnp.asarray(data.weights("w1", 8, 8)))
        self.w2 = nnx.Param(jnp.asarray(data.weights("w2", 8, 4)))

    def __call__(self, x):
        z = jnp.tanh(x @ self.w1) @ self.w2
        return z * jax.lax.rsqrt(jnp.sum(z**2, axis=1, keepdims=True) + 1e-6)


def nt_xent(z1, z2):
    z = jnp.concatenate([z1, z2], axis=0)
    logits = z @ z.T / 0.5
    logits = logits - 1e9 * jnp.eye(z.shape[0])
    positive = jnp.sum(z1 * z2, axis=1) / 0.5
    positive = jnp.concatenate([positive, positive], axis=0)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - positive)


def program(strategy, global_batch):
    with strategy.scope():
        model = Encoder()
        optimizer = tpudist.Optimizer(optax.sgd(0.2), model)
    initial = jax.tree.map(np.asarray, nnx.state((model, optimizer)))

    def replica_step(model, optimizer, view1, view2):
        def loss_fn(model):
            z1, z2 = model(view1), model(view2)
            return nt_xent(z1, z2), jnp.mean(z1 @ z2.T)

        (loss, alignment), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, gradients)
        return loss, alignment

    @tpudist.function
    def train_step(model, optimizer, batch):
        loss, alignment = strategy.run(replica_step, args=(model, optimizer, *batch))
        return loss, alignment, strategy.reduce(tpudist.ReduceOp.MEAN, loss, axis=None)

    def run(dataset):
        with strategy.scope():
            nnx.update((model, optimizer), initial)
        steps = [train_step(model, optimizer, batch) for _ in range(2) for batch in dataset]
        return {
            "losses": [parts(strategy, loss) for loss, _, _ in steps],
            "alignment": [parts(strategy, alignment) for _, alignment, _ in steps],
            "reduced": [float(mean) for _, _, mean in steps],
            "w1": data.summary(model.w1[...]),
            "w2": data.summary(model.w2[...]),
        }

    return run
