"""A recurrent net over time and a CTC loss."""

import tensorflow as tf

from . import data
from .runs import parts

NUM_FRAMES, WIDTH, NUM_SYMBOLS = 8, 6, 5


def program(strategy, global_batch):
    with strategy.scope():
        wx = tf.Variable(data.weights("wx", 4, WIDTH))
        wh = tf.Variable(data.weights("wh", WIDTH, WIDTH))
        out = tf.Variable(data.weights("out", WIDTH, NUM_SYMBOLS))
        optimizer = tf.keras.optimizers.SGD(0.05)
        optimizer.build([wx, wh, out])
    variables = [wx, wh, out, *optimizer.variables]
    initial = [v.numpy() for v in variables]

    def apply(x):
        h = tf.zeros((tf.shape(x)[0], WIDTH))
        outputs = []
        for t in range(NUM_FRAMES):
            h = tf.tanh(x[:, t] @ wx + h @ wh)
            outputs.append(h @ out)
        return tf.stack(outputs, axis=1)

    def replica_step(frames, words):
        with tf.GradientTape() as tape:
            logits = apply(frames)
            rows = tf.shape(frames)[0]
            losses = tf.nn.ctc_loss(
                words,
                logits,
                label_length=tf.fill([rows], 2),
                logit_length=tf.fill([rows], NUM_FRAMES),
                logits_time_major=False,
                blank_index=0,
            )
            loss = tf.reduce_sum(losses) / global_batch
        gradients = tape.gradient(loss, [wx, wh, out])
        optimizer.apply_gradients(zip(gradients, [wx, wh, out], strict=True))
        return loss, losses

    @tf.function(reduce_retracing=True)
    def train_step(batch):
        loss, losses = strategy.run(replica_step, args=batch)
        return losses, strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)

    def run(dataset):
        for variable, value in zip(variables, initial, strict=True):
            variable.assign(value)
        steps = [train_step(batch) for _ in range(2) for batch in dataset]
        return {
            "losses": [parts(strategy, losses) for losses, _ in steps],
            "reduced": [float(total) for _, total in steps],
            "wx": data.summary(wx.numpy()),
            "wh": data.summary(wh.numpy()),
            "out": data.summary(out.numpy()),
        }

    return run
