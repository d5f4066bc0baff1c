"""The mean of the losses on each replica, and Variables that count rows."""

import jax
import jax.numpy as jnp

import tpudist

from . import data
from .runs import parts


def program(strategy, global_batch):
    on_read = tpudist.VariableSynchronization.ON_READ
    total, mean = tpudist.VariableAggregation.SUM, tpudist.VariableAggregation.MEAN
    with strategy.scope():
        w1 = tpudist.Variable(data.weights("w1", 8, 8), aggregation=mean)
        w2 = tpudist.Variable(data.weights("w2", 8, 1), aggregation=mean)
        count = tpudist.Variable(0, trainable=False, synchronization=on_read, aggregation=total)
        rows = tpudist.Variable(0.0, trainable=False, synchronization=on_read, aggregation=mean)
        seen = tpudist.Variable(0.0, trainable=False, synchronization=on_read, aggregation=total)
    variables = [w1, w2, count, rows, seen]
    initial = [v.numpy() for v in variables]

    def replica_step(x, y):
        def loss_fn(values):
            predicted = jnp.tanh(x @ values[0]) @ values[1]
            return jnp.mean((predicted - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_fn)([w1.read_value(), w2.read_value()])
        context = tpudist.get_replica_context()
        gradients = context.all_reduce(tpudist.ReduceOp.MEAN, gradients)
        for variable, gradient in zip([w1, w2], gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        count.assign_add(x.shape[0])
        rows.assign_add(float(x.shape[0]))
        seen.assign_add(jnp.sum(jnp.ones_like(y)))
        return loss, x.shape[0]

    @tpudist.function
    def train_step(batch):
        loss, rows = strategy.run(replica_step, args=batch)
        reduced = strategy.reduce(tpudist.ReduceOp.MEAN, loss, axis=None)
        return loss, reduced, rows

    def run(dataset):
        for variable, value in zip(variables, initial, strict=True):
            variable.assign(value)
        steps = [train_step(batch) for _ in range(2) for batch in dataset]
        return {
            "losses": [parts(strategy, loss) for loss, _, _ in steps],
            "reduced": [float(reduced) for _, reduced, _ in steps],
            "rows of replicas": [parts(strategy, rows) for _, _, rows in steps],
            "count": int(count.read_value()),
            "rows": float(rows.read_value()),
            "seen": float(seen.read_value()),
            "w1": data.summary(w1.numpy()),
            "w2": data.summary(w2.numpy()),
        }

    return run
