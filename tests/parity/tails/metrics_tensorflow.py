"""An evaluation: metrics that are updated, sums of correct answers, losses averaged over rows."""

import tensorflow as tf

from . import data
from .runs import parts


def program(strategy, global_batch):
    with strategy.scope():
        w = tf.Variable(data.weights("w", 8, 3))
        loss_metric = tf.keras.metrics.Mean()
        accuracy_metric = tf.keras.metrics.SparseCategoricalAccuracy()

    def replica_step(x, y):
        logits = x @ w
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        loss_metric.update_state(losses)
        accuracy_metric.update_state(y, logits)
        correct = tf.cast(tf.argmax(logits, -1, output_type=tf.int32) == y, tf.float32)
        return {
            "losses": losses,
            "correct": tf.reduce_sum(correct),
            "top 2": tf.reduce_sum(tf.cast(tf.math.in_top_k(y, logits, 2), tf.int32)),
            "num": tf.size(y),
        }

    @tf.function(reduce_retracing=True)
    def eval_step(batch):
        out = strategy.run(replica_step, args=batch)
        sums = {
            k: strategy.reduce(tf.distribute.ReduceOp.SUM, out[k], axis=None)
            for k in ("correct", "top 2", "num")
        }
        mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, out["losses"], axis=0)
        return out["losses"], sums, mean

    def run(dataset):
        loss_metric.reset_state()
        accuracy_metric.reset_state()
        steps = [eval_step(batch) for batch in dataset]
        return {
            "losses": [parts(strategy, losses) for losses, _, _ in steps],
            "correct": [float(sums["correct"]) for _, sums, _ in steps],
            "top 2": [int(sums["top 2"]) for _, sums, _ in steps],
            "num": [int(sums["num"]) for _, sums, _ in steps],
            "mean": [float(mean) for _, _, mean in steps],
            "loss": float(loss_metric.result()),
            "accuracy": float(accuracy_metric.result()),
        }

    return run
