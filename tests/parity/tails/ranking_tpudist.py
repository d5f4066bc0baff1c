"""Top-k accuracy, and rows in the order of their losses: sort, argsort, ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpudist

from . import data
from .runs import parts


def program(strategy, global_batch):
    with strategy.scope():
        w = tpudist.Variable(data.weights("w", 8, 3))

    def replica_step(x, y):
        logits = x @ w
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        _, top = jax.lax.top_k(logits, 2)
        order = jnp.argsort(losses)
        hardest = jnp.sort(losses, descending=True)
        discounts = 1.0 / jnp.log(jnp.arange(x.shape[0]) + 2.0)
        return {
            "top 2": jnp.sum(jnp.any(top == y[:, None], axis=-1).astype(jnp.float32)),
            "predicted": jnp.argmax(logits, axis=-1),
            "order": order,
            "ranks": jnp.argsort(order),
            "sorted rows": x[order][:, 0],
            "hardest": hardest,
            "from the hardest": jnp.cumsum(hardest[::-1])[::-1],
            "gain": jnp.sum(hardest * discounts),
            "largest": jnp.max(losses),
            "least": jnp.min(losses),
            "all above": jnp.all(losses > 0.1),
            "any below": jnp.any(losses < 0.5),
        }

    @tpudist.function
    def eval_step(batch):
        out = strategy.run(replica_step, args=batch)
        top = strategy.reduce(tpudist.ReduceOp.SUM, out["top 2"], axis=None)
        return out, top

    def run(dataset):
        steps = [eval_step(batch) for batch in dataset]
        return {
            "replicas": [{k: parts(strategy, v) for k, v in out.items()} for out, _ in steps],
            "top 2": [float(top) for _, top in steps],
            "gathered": [np.asarray(strategy.gather(out["predicted"], axis=0)) for out, _ in steps],
        }

    return run
