"""A convolutional net with batch normalisation over the rows of each replica."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpudist

from . import data
from .runs import parts

MOMENTUM = 0.9


class ConvNet(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), use_bias=False, rngs=rngs)
        self.conv.kernel[...] = jnp.asarray(data.weights("kernel", 3, 3, 2, 4))
        self.norm = nnx.BatchNorm(
            4, momentum=MOMENTUM, epsilon=1e-5, use_fast_variance=False, rngs=rngs
        )
        self.head = nnx.Param(jnp.asarray(data.weights("head", 4, 3)))

    def __call__(self, x):
        x = self.conv(x)
        x = nnx.relu(self.norm(x))
        x = nnx.avg_pool(x, (2, 2), (2, 2))
        return jnp.mean(x, axis=(1, 2)) @ self.head


def program(strategy, global_batch):
    with strategy.scope():
        model = ConvNet(nnx.Rngs(0))
        optimizer = tpudist.Optimizer(optax.sgd(0.5), model)
    initial = jax.tree.map(np.asarray, nnx.state((model, optimizer)))

    def replica_step(model, optimizer, x, y):
        def loss_fn(model):
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
            return jnp.sum(losses) / global_batch

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    @tpudist.function
    def train_step(model, optimizer, batch):
        loss = strategy.run(replica_step, args=(model, optimizer, *batch))
        return loss, strategy.reduce(tpudist.ReduceOp.SUM, loss, axis=None)

    def run(dataset):
        with strategy.scope():
            nnx.update((model, optimizer), initial)
        steps = [train_step(model, optimizer, batch) for _ in range(2) for batch in dataset]
        return {
            "losses": [parts(strategy, loss) for loss, _ in steps],
            "reduced": [float(total) for _, total in steps],
            "mean": np.asarray(model.norm.mean[...]),
            "var": np.asarray(model.norm.var[...]),
            "scale": data.summary(model.norm.scale[...]),
            "bias": data.summary(model.norm.bias[...]),
            "kernel": data.summary(model.conv.kernel[...]),
            "head": data.summary(model.head[...]),
        }

    return run
