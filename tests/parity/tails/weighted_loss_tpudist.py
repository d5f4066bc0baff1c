"""Losses of examples, summed and divided by the global batch; an optimizer with momentum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpudist

from . import data
from .runs import parts


class Classifier(nnx.Module):
    def __init__(self):
        self.w1, self.b1 = nnx.Param(jnp.asarray(data.weights("w1", 8, 8))), nnx.Param(jnp.zeros(8))
        self.w2, self.b2 = nnx.Param(jnp.asarray(data.weights("w2", 8, 3))), nnx.Param(jnp.zeros(3))

    def __call__(self, x):
        hidden = nnx.relu(x @ self.w1 + self.b1)
        return hidden @ self.w2 + self.b2


def program(strategy, global_batch):
    with strategy.scope():
        model = Classifier()
        optimizer = tpudist.Optimizer(optax.sgd(0.1, momentum=0.9), model)
    initial = jax.tree.map(np.asarray, nnx.state((model, optimizer)))

    def replica_step(model, optimizer, x, y):
        def loss_fn(model):
            logits = model(x)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return jnp.sum(losses) / global_batch, logits

        (loss, logits), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, gradients)
        correct = jnp.argmax(logits, axis=-1) == y
        return loss, jnp.sum(correct, dtype=jnp.int32)

    @tpudist.function
    def train_step(model, optimizer, batch):
        loss, correct = strategy.run(replica_step, args=(model, optimizer, *batch))
        total = strategy.reduce(tpudist.ReduceOp.SUM, loss, axis=None)
        correct = strategy.reduce(tpudist.ReduceOp.SUM, correct, axis=None)
        return loss, total, correct

    def run(dataset):
        with strategy.scope():
            nnx.update((model, optimizer), initial)
        steps = [train_step(model, optimizer, batch) for _ in range(2) for batch in dataset]
        return {
            "losses": [parts(strategy, loss) for loss, _, _ in steps],
            "reduced": [float(total) for _, total, _ in steps],
            "correct": [int(correct) for _, _, correct in steps],
            "w1": data.summary(model.w1[...]),
            "b1": data.summary(model.b1[...]),
            "w2": data.summary(model.w2[...]),
            "b2": data.summary(model.b2[...]),
        }

    return run
