"""Sums by class: segment_sum, one-hot counts, a confusion matrix, bincount, weights of classes."""

import tensorflow as tf

from . import data
from .runs import parts

NUM_CLASSES = data.NUM_CLASSES


def program(strategy, global_batch):
    with strategy.scope():
        w = tf.Variable(data.weights("w", 8, NUM_CLASSES), aggregation=tf.VariableAggregation.MEAN)
        confusion = tf.Variable(
            tf.zeros((NUM_CLASSES, NUM_CLASSES), tf.int32),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    initial = w.numpy()

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            logits = x @ w
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            counts = tf.reduce_sum(tf.one_hot(y, NUM_CLASSES), axis=0)
            by_class = tf.math.unsorted_segment_sum(losses, y, NUM_CLASSES)
            loss = tf.reduce_sum(by_class / tf.maximum(counts, 1.0))
        gradient = tape.gradient(loss, w)
        context = tf.distribute.get_replica_context()
        w.assign_sub(0.1 * context.all_reduce(tf.distribute.ReduceOp.SUM, gradient))
        predicted = tf.argmax(logits, axis=-1, output_type=tf.int32)
        confusion.assign_add(tf.math.confusion_matrix(y, predicted, NUM_CLASSES))
        return {
            "loss": loss,
            "counts": counts,
            "bincount": tf.math.bincount(y, minlength=NUM_CLASSES, maxlength=NUM_CLASSES),
            "centers": tf.math.unsorted_segment_sum(x[:, :2], y, NUM_CLASSES),
            "share": counts / tf.cast(tf.shape(y)[0], tf.float32),
        }

    @tf.function(reduce_retracing=True)
    def train_step(batch):
        out = strategy.run(replica_step, args=batch)
        sums = {
            k: strategy.reduce(tf.distribute.ReduceOp.SUM, out[k], axis=None)
            for k in ("loss", "counts", "bincount", "centers")
        }
        return out, sums

    def run(dataset):
        w.assign(initial)
        confusion.assign(tf.zeros_like(confusion))
        steps = [train_step(batch) for batch in dataset]
        return {
            "replicas": [{k: parts(strategy, v) for k, v in out.items()} for out, _ in steps],
            "sums": [{k: v.numpy() for k, v in sums.items()} for _, sums in steps],
            "confusion": confusion.read_value().numpy(),
            "w": data.summary(w.numpy()),
        }

    return run
