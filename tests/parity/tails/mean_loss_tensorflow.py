"""The mean of the losses on each replica, and Variables that count rows."""

import tensorflow as tf

from . import data
from .runs import parts


def program(strategy, global_batch):
    on_read = tf.VariableSynchronization.ON_READ
    total, mean = tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN
    with strategy.scope():
        w1 = tf.Variable(data.weights("w1", 8, 8), aggregation=mean)
        w2 = tf.Variable(data.weights("w2", 8, 1), aggregation=mean)
        count = tf.Variable(0, trainable=False, synchronization=on_read, aggregation=total)
        rows = tf.Variable(0.0, trainable=False, synchronization=on_read, aggregation=mean)
        seen = tf.Variable(0.0, trainable=False, synchronization=on_read, aggregation=total)
    variables = [w1, w2, count, rows, seen]
    initial = [v.numpy() for v in variables]

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            predicted = tf.tanh(x @ w1) @ w2
            loss = tf.reduce_mean((predicted - y) ** 2)
        gradients = tape.gradient(loss, [w1, w2])
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        for variable, gradient in zip([w1, w2], gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        count.assign_add(tf.shape(x)[0])
        rows.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        seen.assign_add(tf.reduce_sum(tf.ones_like(y)))
        return loss, tf.shape(x)[0]

    @tf.function(reduce_retracing=True)
    def train_step(batch):
        loss, rows = strategy.run(replica_step, args=batch)
        reduced = strategy.reduce(tf.distribute.ReduceOp.MEAN, loss, axis=None)
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
