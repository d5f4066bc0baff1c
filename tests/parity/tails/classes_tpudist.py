"""Sums by class: segment_sum, one-hot counts, a confusion matrix, bincount, weights of classes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpudist

from . import data
from .runs import parts

NUM_CLASSES = data.NUM_CLASSES


def program(strategy, global_batch):
    with strategy.scope():
        w = tpudist.Variable(
            data.weights("w", 8, NUM_CLASSES), aggregation=tpudist.VariableAggregation.MEAN
        )
        confusion = tpudist.Variable(
            jnp.zeros((NUM_CLASSES, NUM_CLASSES), jnp.int32),
            trainable=False,
            synchronization=tpudist.VariableSynchronization.ON_READ,
            aggregation=tpudist.VariableAggregation.SUM,
        )
    initial = w.numpy()

    def replica_step(x, y):
        def loss_fn(w):
            logits = x @ w
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            counts = jnp.sum(jax.nn.one_hot(y, NUM_CLASSES), axis=0)
            by_class = jax.ops.segment_sum(losses, y, NUM_CLASSES)
            return jnp.sum(by_class / jnp.maximum(counts, 1.0)), (logits, counts)

        (loss, (logits, counts)), gradient = jax.value_and_grad(loss_fn, has_aux=True)(
            w.read_value()
        )
        context = tpudist.get_replica_context()
        w.assign_sub(0.1 * context.all_reduce(tpudist.ReduceOp.SUM, gradient))
        predicted = jnp.argmax(logits, axis=-1)
        confusion.assign_add(jnp.zeros_like(confusion).at[y, predicted].add(1))
        return {
            "loss": loss,
            "counts": counts,
            "bincount": jnp.bincount(y, length=NUM_CLASSES),
            "centers": jax.ops.segment_sum(x[:, :2], y, NUM_CLASSES),
            "share": counts / y.shape[0],
        }

    @tpudist.function
    def train_step(batch):
        out = strategy.run(replica_step, args=batch)
        sums = {
            k: strategy.reduce(tpudist.ReduceOp.SUM, out[k], axis=None)
            for k in ("loss", "counts", "bincount", "centers")
        }
        return out, sums

    def run(dataset):
        w.assign(initial)
        confusion.assign(jnp.zeros((NUM_CLASSES, NUM_CLASSES), jnp.int32))
        steps = [train_step(batch) for batch in dataset]
        return {
            "replicas": [{k: parts(strategy, v) for k, v in out.items()} for out, _ in steps],
            "sums": [{k: np.asarray(v) for k, v in sums.items()} for _, sums in steps],
            "confusion": np.asarray(confusion.read_value()),
            "w": data.summary(w.numpy()),
        }

    return run
