"""A recurrent net over time and a CTC loss."""

import jax
import jax.numpy as jnp
import optax

import tpudist

from . import data
from .runs import parts

NUM_FRAMES, WIDTH, NUM_SYMBOLS = 8, 6, 5


def program(strategy, global_batch):
    with strategy.scope():
        wx = tpudist.Variable(data.weights("wx", 4, WIDTH))
        wh = tpudist.Variable(data.weights("wh", WIDTH, WIDTH))
        out = tpudist.Variable(data.weights("out", WIDTH, NUM_SYMBOLS))
        optimizer = tpudist.Optimizer(optax.sgd(0.05))
    variables = [wx, wh, out]
    initial = [v.numpy() for v in variables]

    def apply(params, x):
        wx, wh, out = params

        def step(h, x):
            h = jnp.tanh(x @ wx + h @ wh)
            return h, h @ out

        h = jnp.zeros((x.shape[0], WIDTH))
        _, outputs = jax.lax.scan(step, h, x.transpose(1, 0, 2))
        return outputs.transpose(1, 0, 2)

    def replica_step(frames, words):
        def loss_fn(params):
            logits = apply(params, frames)
            rows = frames.shape[0]
            losses = optax.ctc_loss(
                logits,
                jnp.zeros((rows, NUM_FRAMES)),
                words,
                jnp.zeros((rows, 2)),
            )
            return jnp.sum(losses) / global_batch, losses

        params = [v.read_value() for v in variables]
        (loss, losses), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss, losses

    @tpudist.function
    def train_step(batch):
        loss, losses = strategy.run(replica_step, args=batch)
        return losses, strategy.reduce(tpudist.ReduceOp.SUM, loss, axis=None)

    def run(dataset):
        for variable, value in zip(variables, initial, strict=True):
            variable.assign(value)
        steps = [train_step(batch) for _ in range(2) for batch in dataset]
        return {
            "losses": [parts(strategy, losses) for losses, _ in steps],
            "reduced": [float(total) for _, total in steps],
            "wx": data.summary(wx.numpy()),
            "wh": data.summary(wh.numpy()),
            "out": data.summary(out.numpy()),
        }

    return run
