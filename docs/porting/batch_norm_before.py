"""Synchronous batch normalisation, written with merge_call and with all_reduce."""

import json

import numpy as np
import tensorflow as tf

NUM_REPLICAS, GLOBAL_BATCH, NUM_EPOCHS, MOMENTUM, LEARNING_RATE = 8, 64, 3, 0.9, 0.1

rng = np.random.default_rng(0)
x = (3 * rng.normal(size=(240, 4)) + 5).astype(np.float32)  # 3 batches of 64 and one of 48
y = np.tanh(x - 5).sum(axis=1, keepdims=True).astype(np.float32)
w = rng.normal(size=(4, 6)).astype(np.float32)
v = rng.normal(size=(6, 1)).astype(np.float32)

[cpu] = tf.config.list_physical_devices("CPU")
devices = [tf.config.LogicalDeviceConfiguration()] * NUM_REPLICAS
tf.config.set_logical_device_configuration(cpu, devices)
strategy = tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(NUM_REPLICAS)])


@tf.custom_gradient
def sum_by_merge_call(*values):
    """The sum over all replicas; its gradient is the sum of the replicas' gradients."""

    def merge(strategy, *values):
        pairs = [(value, value) for value in values]
        return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)

    sums = tf.distribute.get_replica_context().merge_call(merge, args=values)
    return sums, lambda *upstream: sum_by_merge_call(*upstream)


def sum_by_all_reduce(*values):
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, list(values))


class SyncBatchNorm(tf.Module):
    def __init__(self, num_features, sum_over_replicas):
        super().__init__()
        self.sum_over_replicas = sum_over_replicas
        mean = tf.VariableAggregation.MEAN
        self.scale = tf.Variable(tf.ones(num_features))
        self.offset = tf.Variable(tf.zeros(num_features))
        self.moving_mean = tf.Variable(tf.zeros(num_features), trainable=False, aggregation=mean)
        self.moving_variance = tf.Variable(
            tf.ones(num_features),
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=mean,
        )

    def __call__(self, x):
        rows = tf.cast(tf.shape(x)[0], x.dtype)
        sums = [rows, tf.reduce_sum(x, axis=0), tf.reduce_sum(x**2, axis=0)]
        rows, total, squares = self.sum_over_replicas(*sums)
        mean = total / rows
        variance = squares / rows - mean**2
        for moving, new in (self.moving_mean, mean), (self.moving_variance, variance):
            moving.assign(MOMENTUM * moving + (1 - MOMENTUM) * new)
        return (x - mean) * tf.math.rsqrt(variance + 1e-3) * self.scale + self.offset

    def infer(self, x):
        normal = (x - self.moving_mean) * tf.math.rsqrt(self.moving_variance + 1e-3)
        return normal * self.scale + self.offset


def train(sum_over_replicas):
    with strategy.scope():
        first, last = tf.Variable(w), tf.Variable(v)
        norm = SyncBatchNorm(6, sum_over_replicas)
    trained = [first, norm.scale, norm.offset, last]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL_BATCH)
    dataset = strategy.experimental_distribute_dataset(dataset)

    def replica_step(x, y):
        replica = tf.distribute.get_replica_context()
        num_examples = replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.shape(x)[0])
        with tf.GradientTape() as tape:
            predicted = tf.nn.relu(norm(x @ first)) @ last
            losses = tf.reduce_sum((predicted - y) ** 2, axis=1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=num_examples)
        gradients = tape.gradient(loss, trained)
        gradients = replica.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        for variable, gradient in zip(trained, gradients, strict=True):
            variable.assign_sub(LEARNING_RATE * gradient)
        return loss, gradients[0]

    @tf.function
    def train_step(batch):
        loss, gradient = strategy.run(replica_step, args=batch)
        loss = strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)
        return loss, strategy.reduce(tf.distribute.ReduceOp.MEAN, gradient, axis=None)

    steps = [train_step(batch) for _ in range(NUM_EPOCHS) for batch in dataset]
    predicted = tf.nn.relu(norm.infer(x @ first)) @ last
    return {
        "losses": [float(loss) for loss, _ in steps],
        "gradient_norms": [float(tf.norm(gradient)) for _, gradient in steps],
        "moving_mean": norm.moving_mean.numpy().tolist(),
        "moving_variance": norm.moving_variance.read_value().numpy().tolist(),
        "final": float(tf.reduce_mean((predicted - y) ** 2)),
        "norm": float(tf.linalg.global_norm(trained)),
    }


results = {"merge_call": train(sum_by_merge_call), "all_reduce": train(sum_by_all_reduce)}
print(json.dumps(results))
