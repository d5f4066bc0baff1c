"""Two batches of one shape in one step: labelled rows, the last ones few, and unlabelled ones."""

import tensorflow as tf

from . import data
from .runs import parts


def program(strategy, global_batch):
    with strategy.scope():
        w1 = tf.Variable(data.weights("w1", 8, 8))
        w2 = tf.Variable(data.weights("w2", 8, 3))
        optimizer = tf.keras.optimizers.SGD(0.2)
        optimizer.build([w1, w2])
    variables = [w1, w2, *optimizer.variables]
    initial = [v.numpy() for v in variables]

    def replica_step(labelled, unlabelled):
        (x, y), (u,) = labelled, unlabelled
        with tf.GradientTape() as tape:
            together = tf.concat([x, u], axis=0)
            logits = tf.tanh(together @ w1) @ w2
            rows = tf.shape(x)[0]
            supervised = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits[:rows])
            )
            p = tf.nn.softmax(logits[rows:])
            entropy = -tf.reduce_mean(tf.reduce_sum(p * tf.math.log(p), axis=-1))
            distance = tf.reduce_sum(x) * tf.reduce_mean(u) / 100.0
            loss = (supervised + 0.3 * entropy) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, [w1, w2])
        optimizer.apply_gradients(zip(gradients, [w1, w2], strict=True))
        return {
            "supervised": supervised,
            "entropy": entropy,
            "distance": distance,
            "rows": tf.shape(together)[0],
        }

    @tf.function(reduce_retracing=True)
    def train_step(labelled, unlabelled):
        out = strategy.run(replica_step, args=(labelled, unlabelled))
        return out, strategy.reduce(tf.distribute.ReduceOp.MEAN, out["entropy"], axis=None)

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
