"""Operations over rows on a replica without rows; the first replica has one row."""

import tensorflow as tf

from .. import plain
from .runs import parts

OPERATIONS = {
    "sum": lambda x: tf.reduce_sum(x, 0),
    "mean": lambda x: tf.reduce_mean(x, 0),
    "mean of all": lambda x: tf.reduce_mean(x),
    "prod": lambda x: tf.reduce_prod(x, 0),
    "max": lambda x: tf.reduce_max(x, 0),
    "min": lambda x: tf.reduce_min(x, 0),
    "max of integers": lambda x: tf.reduce_max(tf.cast(x, tf.int32), 0),
    "min of integers": lambda x: tf.reduce_min(tf.cast(x, tf.int32), 0),
    "all": lambda x: tf.reduce_all(x > 0, 0),
    "any": lambda x: tf.reduce_any(x > 0, 0),
    "argmax": lambda x: tf.argmax(x, 0, output_type=tf.int32),
    "argmin": lambda x: tf.argmin(x, 0, output_type=tf.int32),
    "var": lambda x: tf.math.reduce_variance(x, 0),
    "std": lambda x: tf.math.reduce_std(x, 0),
    "logsumexp": lambda x: tf.reduce_logsumexp(x, 0),
    "norm": lambda x: tf.norm(x),
    "gram": lambda x: tf.transpose(x) @ x,
    "pairs": lambda x: tf.reduce_sum(x @ tf.transpose(x)),
    "mean of pairs": lambda x: tf.reduce_mean(x @ tf.transpose(x)),
    "softmax": lambda x: tf.nn.softmax(x, axis=0),
    "sort": lambda x: tf.sort(x, axis=0),
    "argsort": lambda x: tf.argsort(x, axis=0),
    "cumsum": lambda x: tf.cumsum(x),
    "reversed": lambda x: x[::-1],
    "rolled": lambda x: tf.roll(x, 1, axis=0),
    "doubled": lambda x: tf.concat([x, x], 0),
    "all but the first": lambda x: x[1:],
    "first row": lambda x: x[0],
    "last row": lambda x: x[-1],
    "top 1 of rows": lambda x: tf.math.top_k(x[:, 0], 1)[0],
    "number": lambda x: tf.shape(x)[0],
    "one over the number": lambda x: 1.0 / tf.cast(tf.shape(x)[0], tf.float32),
    "segment sum": lambda x: tf.math.unsorted_segment_sum(x, tf.zeros_like(x[:, 0], tf.int32), 2),
    "matmul": lambda x: x @ tf.ones((3, 2)),
    "argmax of classes": lambda x: tf.argmax(x, -1, output_type=tf.int32),
    "convolution": lambda x: tf.reduce_sum(
        tf.nn.conv2d(x[:, :, None, None], tf.ones((1, 1, 1, 1)), 1, "SAME")
    ),
    "cross entropy": lambda x: tf.reduce_mean(
        tf.nn.softmax_cross_entropy_with_logits(tf.ones_like(x) / 3.0, x)
    ),
    "gradient of a mean": lambda x: gradient(lambda w: tf.reduce_mean(x @ w)),
    "gradient of a sum": lambda x: gradient(lambda w: tf.reduce_sum(x @ w)),
    "gradient of a square of a mean": lambda x: gradient(lambda w: tf.reduce_mean(x @ w) ** 2),
    "gradient of a std": lambda x: gradient(
        lambda w: tf.reduce_sum(tf.math.reduce_std(x @ w, 0) + tf.reduce_sum(w))
    ),
    "gradient of a max": lambda x: gradient(lambda w: tf.reduce_sum(tf.reduce_max(x @ w, 0))),
    "gradient of a softmax over rows": lambda x: gradient(
        lambda w: tf.reduce_sum(tf.nn.softmax(x @ w, axis=0) ** 2)
    ),
    "gradient of a weight times a mean": lambda x: gradient(
        lambda w: tf.reduce_sum(w) * tf.reduce_mean(x)
    ),
}


def gradient(loss):
    w = tf.ones((3, 2))
    with tf.GradientTape() as tape:
        tape.watch(w)
        value = loss(w)
    return tape.gradient(value, w)


def program(strategy, global_batch):
    def outcome(batch, operation):
        @tf.function
        def step(x):
            return strategy.run(operation, args=(x,))

        try:
            return parts(strategy, step(batch[0]))
        except Exception as exception:
            return plain.error(exception)

    def run(dataset):
        [_, batch] = dataset
        return {name: outcome(batch, operation) for name, operation in OPERATIONS.items()}

    return run
