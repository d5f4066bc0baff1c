"""Two batches of one shape in one step: labelled rows, the last ones few, and unlabelled ones."""

import jax
import jax.numpy as jnp
import optax

import tpudist

from . import data
from .runs import parts


def program(strategy, global_batch):
    with strategy.scope():
        w1 = tpudist.Variable(data.weights("w1", 8, 8))
        w2 = tpudist.Variable(data.weights("w2", 8, 3))
        optimizer = tpudist.Optimizer(optax.sgd(0.2))
    variables = [w1, w2]
    initial = [v.numpy() for v in variables]

    def replica_step(labelled, unlabelled):
        (x, y), (u,) = labelled, unlabelled

        def loss_fn(params):
            w1, w2 = params
            together = jnp.concatenate([x, u], axis=0)
            logits = jnp.tanh(together @ w1) @ w2
            rows = x.shape[0]
            supervised = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:rows], y))
            p = jax.nn.softmax(logits[rows:])
            entropy = -jnp.mean(jnp.sum(p * jnp.log(p), axis=-1))
            distance = jnp.sum(x) * jnp.mean(u) / 100.0
            loss = (supervised + 0.3 * entropy) / strategy.num_replicas_in_sync
            return loss, {
                "supervised": supervised,
                "entropy": entropy,
                "distance": distance,
                "rows": together.shape[0],
            }

        params = [v.read_value() for v in variables]
        gradients, out = jax.grad(loss_fn, has_aux=True)(params)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return out

    @tpudist.function
    def train_step(labelled, unlabelled):
        out = strategy.run(replica_step, args=(labelled, unlabelled))
        return out, strategy.reduce(tpudist.ReduceOp.MEAN, out["entropy"], axis=None)

    def run(labelled, unlabelled):
        for variable, value in zip(variables, initial, strict=True):
            variable.assign(value)
        steps = [train_step(*batches) for batches in zip(labelled, unlabelled, strict=True)]
        return {
            "replicas": [{k: parts(strategy, v) for k, v in out.items()} for out, _ in steps],
            "entropy": [float(entropy) for _, entropy in steps],
            "w1": data.summary(w1.numpy()),
            "w2": data.summary(w2.numpy()),
        }

    return run
