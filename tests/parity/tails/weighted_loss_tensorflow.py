"""Losses of examples, summed and divided by the global batch; an optimizer with momentum."""

import tensorflow as tf

from . import data
from .runs import parts


class Classifier(tf.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.b1 = tf.Variable(data.weights("w1", 8, 8)), tf.Variable(tf.zeros(8))
        self.w2, self.b2 = tf.Variable(data.weights("w2", 8, 3)), tf.Variable(tf.zeros(3))

    def __call__(self, x):
        hidden = tf.nn.relu(x @ self.w1 + self.b1)
        return hidden @ self.w2 + self.b2


def program(strategy, global_batch):
    with strategy.scope():
        model = Classifier()
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
    variables = [*model.trainable_variables, *optimizer.variables]
    initial = [v.numpy() for v in variables]

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_sum(losses) / global_batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        correct = tf.argmax(logits, axis=-1, output_type=tf.int32) == y
        return loss, tf.reduce_sum(tf.cast(correct, tf.int32))

    @tf.function(reduce_retracing=True)
    def train_step(batch):
        loss, correct = strategy.run(replica_step, args=batch)
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)
        correct = strategy.reduce(tf.distribute.ReduceOp.SUM, correct, axis=None)
        return loss, total, correct

    def run(dataset):
        for variable, value in zip(variables, initial, strict=True):
            variable.assign(value)
        steps = [train_step(batch) for _ in range(2) for batch in dataset]
        return {
            "losses": [parts(strategy, loss) for loss, _, _ in steps],
            "reduced": [float(total) for _, total, _ in steps],
            "correct": [int(correct) for _, _, correct in steps],
            "w1": data.summary(model.w1.numpy()),
            "b1": data.summary(model.b1.numpy()),
            "w2": data.summary(model.w2.numpy()),
            "b2": data.summary(model.b2.numpy()),
        }

    return run
