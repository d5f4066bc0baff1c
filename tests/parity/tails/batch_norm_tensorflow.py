"""A convolutional net with batch normalisation over the rows of each replica."""

import tensorflow as tf

from . import data
from .runs import parts

MOMENTUM = 0.9


class BatchNorm(tf.Module):
    def __init__(self, num_features):
        super().__init__()
        self.scale, self.bias = (
            tf.Variable(tf.ones(num_features)),
            tf.Variable(tf.zeros(num_features)),
        )
        moving = {
            "trainable": False,
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.MEAN,
        }
        self.mean = tf.Variable(tf.zeros(num_features), **moving)
        self.var = tf.Variable(tf.ones(num_features), **moving)

    def __call__(self, x):
        mean = tf.reduce_mean(x, axis=(0, 1, 2))
        var = tf.reduce_mean((x - mean) ** 2, axis=(0, 1, 2))
        for moving, new in (self.mean, mean), (self.var, var):
            moving.assign(MOMENTUM * moving + (1 - MOMENTUM) * new)
        return (x - mean) * tf.math.rsqrt(var + 1e-5) * self.scale + self.bias


class ConvNet(tf.Module):
    def __init__(self):
        super().__init__()
        self.kernel = tf.Variable(data.weights("kernel", 3, 3, 2, 4))
        self.norm = BatchNorm(4)
        self.head = tf.Variable(data.weights("head", 4, 3))

    def __call__(self, x):
        x = tf.nn.conv2d(x, self.kernel, strides=1, padding="SAME")
        x = tf.nn.relu(self.norm(x))
        x = tf.nn.avg_pool2d(x, 2, 2, "VALID")
        return tf.reduce_mean(x, axis=(1, 2)) @ self.head


def program(strategy, global_batch):
    with strategy.scope():
        model = ConvNet()
        optimizer = tf.keras.optimizers.SGD(0.5)
        optimizer.build(model.trainable_variables)
    variables = [*model.variables, *optimizer.variables]
    initial = [v.numpy() for v in variables]

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
            loss = tf.reduce_sum(losses) / global_batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function(reduce_retracing=True)
    def train_step(batch):
        loss = strategy.run(replica_step, args=batch)
        return loss, strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)

    def run(dataset):
        for variable, value in zip(variables, initial, strict=True):
            variable.assign(value)
        steps = [train_step(batch) for _ in range(2) for batch in dataset]
        return {
            "losses": [parts(strategy, loss) for loss, _ in steps],
            "reduced": [float(total) for _, total in steps],
            "mean": model.norm.mean.read_value().numpy(),
            "var": model.norm.var.read_value().numpy(),
            "scale": data.summary(model.norm.scale.numpy()),
            "bias": data.summary(model.norm.bias.numpy()),
            "kernel": data.summary(model.kernel.numpy()),
            "head": data.summary(model.head.numpy()),
        }

    return run
