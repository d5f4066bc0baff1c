"""A contrastive loss between two views: every row against every other row of the replica."""

import tensorflow as tf

from . import data
from .runs import parts


class Encoder(tf.Module):
    def __init__(self):
        super().__init__()
        self.w1 = tf.Variable(data.weights("w1", 8, 8))
        self.w2 = tf.Variable(data.weights("w2", 8, 4))

    def __call__(self, x):
        z = tf.tanh(x @ self.w1) @ self.w2
        return z * tf.math.rsqrt(tf.reduce_sum(z**2, axis=1, keepdims=True) + 1e-6)


def nt_xent(z1, z2):
    z = tf.concat([z1, z2], axis=0)
    logits = z @ tf.transpose(z) / 0.5
    logits = logits - 1e9 * tf.eye(tf.shape(z)[0])
    positive = tf.reduce_sum(z1 * z2, axis=1) / 0.5
    positive = tf.concat([positive, positive], axis=0)
    return tf.reduce_mean(tf.reduce_logsumexp(logits, axis=1) - positive)


def program(strategy, global_batch):
    with strategy.scope():
        model = Encoder()
        optimizer = tf.keras.optimizers.SGD(0.2)
        optimizer.build(model.trainable_variables)
    variables = [*model.trainable_variables, *optimizer.variables]
    initial = [v.numpy() for v in variables]

    def replica_step(view1, view2):
        with tf.GradientTape() as tape:
            z1, z2 = model(view1), model(view2)
            loss = nt_xent(z1, z2)
            alignment = tf.reduce_mean(z1 @ tf.transpose(z2))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, alignment

    @tf.function(reduce_retracing=True)
    def train_step(batch):
        loss, alignment = strategy.run(replica_step, args=batch)
        return loss, alignment, strategy.reduce(tf.distribute.ReduceOp.MEAN, loss, axis=None)

    def run(dataset):
        for variable, value in zip(variables, initial, strict=True):
            variable.assign(value)
        steps = [train_step(batch) for _ in range(2) for batch in dataset]
        return {
            "losses": [parts(strategy, loss) for loss, _, _ in steps],
            "alignment": [parts(strategy, alignment) for _, alignment, _ in steps],
            "reduced": [float(mean) for _, _, mean in steps],
            "w1": data.summary(model.w1.numpy()),
            "w2": data.summary(model.w2.numpy()),
        }

    return run
