"""An evaluation: metrics that are updated, sums of correct answers, losses averaged over rows."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import tpudist

from . import data
from .runs import parts


def program(strategy, global_batch):
    with strategy.scope():
        w = tpudist.Variable(data.weights("w", 8, 3))
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())

    def replica_step(metrics, x, y):
        logits = x @ w
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        metrics.update(loss=losses, logits=logits, labels=y)
        correct = (jnp.argmax(logits, -1) == y).astype(jnp.float32)
        _, top = jax.lax.top_k(logits, 2)
        return {
            "losses": losses,
            "correct": jnp.sum(correct),
            "top 2": jnp.sum(jnp.any(top == y[:, None], axis=-1).astype(jnp.int32)),
            "num": y.size,
        }

    @tpudist.function
    def eval_step(metrics, batch):
        out = strategy.run(replica_step, args=(metrics, *batch))
        sums = {
            k: strategy.reduce(tpudist.ReduceOp.SUM, out[k], axis=None)
            for k in ("correct", "top 2", "num")
        }
        mean = strategy.reduce(tpudist.ReduceOp.MEAN, out["losses"], axis=0)
        return out["losses"], sums, mean

    def run(dataset):
        metrics.reset()
        steps = [eval_step(metrics, batch) for batch in dataset]
        results = metrics.compute()
        return {
            "losses": [parts(strategy, losses) for losses, _, _ in steps],
            "correct": [float(sums["correct"]) for _, sums, _ in steps],
            "top 2": [int(sums["top 2"]) for _, sums, _ in steps],
            "num": [int(sums["num"]) for _, sums, _ in steps],
            "mean": [float(mean) for _, _, mean in steps],
            "loss": float(results["loss"]),
            "accuracy": float(results["accuracy"]),
        }

    return run
