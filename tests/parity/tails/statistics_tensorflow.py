"""Statistics over the rows of a replica: moments, extremes, softmax, normalised features."""

import tensorflow as tf

from . import data
from .runs import parts


def program(strategy, global_batch):
    with strategy.scope():
        w = tf.Variable(data.weights("w", 8, 3), aggregation=tf.VariableAggregation.MEAN)
    initial = w.numpy()

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            z = x @ w
            z = (z - tf.reduce_mean(z, 0)) * tf.math.rsqrt(tf.math.reduce_variance(z, 0) + 0.1)
            weights = tf.nn.softmax(tf.reduce_sum(x, 1), axis=0)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, z)
            loss = tf.reduce_sum(weights * losses)
        gradient = tape.gradient(loss, w)
        context = tf.distribute.get_replica_context()
        w.assign_sub(0.1 * context.all_reduce(tf.distribute.ReduceOp.MEAN, gradient))
        few = x[:, :2]
        return {
            "loss": loss,
            "mean": tf.reduce_mean(few, 0),
            "var": tf.math.reduce_variance(few, 0),
            "std": tf.math.reduce_std(few, 0),
            "max": tf.reduce_max(few, 0),
            "min": tf.reduce_min(few, 0),
            "prod": tf.reduce_prod(few, 0),
            "sum": tf.reduce_sum(few, 0),
            "logsumexp": tf.reduce_logsumexp(few, 0),
            "norm": tf.norm(few),
            "gram": tf.transpose(few) @ few,
            "softmax": tf.nn.softmax(few, axis=0),
            "cumsum": tf.cumsum(few),
            "fraction": tf.reduce_mean(tf.cast(few > 0, tf.float32)),
        }

    @tf.function(reduce_retracing=True)
    def step(batch):
        out = strategy.run(replica_step, args=batch)
        return out, strategy.reduce(tf.distribute.ReduceOp.MEAN, out["softmax"], axis=0)

    def run(dataset):
        w.assign(initial)
        steps = [step(batch) for batch in dataset]
        return {
            "replicas": [{k: parts(strategy, v) for k, v in out.items()} for out, _ in steps],
            "softmax": [mean.numpy() for _, mean in steps],
            "w": data.summary(w.numpy()),
        }

    return run
