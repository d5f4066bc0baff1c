"""Statistics over the rows of a replica: moments, extremes, softmax, normalised features."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpudist

from . import data
from .runs import parts


def program(strategy, global_batch):
    with strategy.scope():
        w = tpudist.Variable(data.weights("w", 8, 3), aggregation=tpudist.VariableAggregation.MEAN)
    initial = w.numpy()

    def replica_step(x, y):
        def loss_fn(w):
            z = x @ w
            z = (z - jnp.mean(z, 0)) * jax.lax.rsqrt(jnp.var(z, 0) + 0.1)
            weights = jax.nn.softmax(jnp.sum(x, 1), axis=0)
            losses = optax.softmax_cross_entropy_with_integer_labels(z, y)
            return jnp.sum(weights * losses)

        loss, gradient = jax.value_and_grad(loss_fn)(w.read_value())
        context = tpudist.get_replica_context()
        w.assign_sub(0.1 * context.all_reduce(tpudist.ReduceOp.MEAN, gradient))
        few = x[:, :2]
        return {
            "loss": loss,
            "mean": jnp.mean(few, 0),
            "var": jnp.var(few, 0),
            "std": jnp.std(few, 0),
            "max": jnp.max(few, 0),
            "min": jnp.min(few, 0),
            "prod": jnp.prod(few, 0),
            "sum": jnp.sum(few, 0),
            "logsumexp": jax.nn.logsumexp(few, 0),
            "norm": jnp.linalg.norm(few),
            "gram": jnp.transpose(few) @ few,
            "softmax": jax.nn.softmax(few, axis=0),
            "cumsum": jnp.cumsum(few, axis=0),
            "fraction": jnp.mean(few > 0),
        }

    @tpudist.function
    def step(batch):
        out = strategy.run(replica_step, args=batch)
        return out, strategy.reduce(tpudist.ReduceOp.MEAN, out["softmax"], axis=0)

    def run(dataset):
        w.assign(initial)
        steps = [step(batch) for batch in dataset]
        return {
            "replicas": [{k: parts(strategy, v) for k, v in out.items()} for out, _ in steps],
            "softmax": [np.asarray(mean) for _, mean in steps],
            "w": data.summary(w.numpy()),
        }

    return run
