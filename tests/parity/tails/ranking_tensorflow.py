"""Top-k accuracy, and rows in the order of their losses: sort, argsort, ranks."""

import tensorflow as tf

from . import data
from .runs import parts


def program(strategy, global_batch):
    with strategy.scope():
        w = tf.Variable(data.weights("w", 8, 3))

    def replica_step(x, y):
        logits = x @ w
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        _, top = tf.math.top_k(logits, 2)
        order = tf.argsort(losses)
        hardest = tf.sort(losses, direction="DESCENDING")
        discounts = 1.0 / tf.math.log(tf.cast(tf.range(tf.shape(x)[0]), tf.float32) + 2.0)
        return {
            "top 2": tf.reduce_sum(tf.cast(tf.reduce_any(top == y[:, None], axis=-1), tf.float32)),
            "predicted": tf.argmax(logits, axis=-1, output_type=tf.int32),
            "order": order,
            "ranks": tf.argsort(order),
            "sorted rows": tf.gather(x, order)[:, 0],
            "hardest": hardest,
            "from the hardest": tf.cumsum(hardest, reverse=True),
            "gain": tf.reduce_sum(hardest * discounts),
            "largest": tf.reduce_max(losses),
            "least": tf.reduce_min(losses),
            "all above": tf.reduce_all(losses > 0.1),
            "any below": tf.reduce_any(losses < 0.5),
        }

    @tf.function(reduce_retracing=True)
    def eval_step(batch):
        out = strategy.run(replica_step, args=batch)
        top = strategy.reduce(tf.distribute.ReduceOp.SUM, out["top 2"], axis=None)
        return out, top

    def run(dataset):
        steps = [eval_step(batch) for batch in dataset]
        return {
            "replicas": [{k: parts(strategy, v) for k, v in out.items()} for out, _ in steps],
            "top 2": [float(top) for _, top in steps],
            "gathered": [strategy.gather(out["predicted"], axis=0).numpy() for out, _ in steps],
        }

    return run
