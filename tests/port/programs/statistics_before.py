"""Replicas count and sum their examples, in a loop of steps."""

import numpy as np
import tensorflow as tf

NUM_DEVICES = 8
GLOBAL_BATCH = 32
NUM_EPOCHS = 2

cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    cpus[0], [tf.config.LogicalDeviceConfiguration() for _ in range(NUM_DEVICES)]
)
strategy = tf.distribute.MirroredStrategy(
    [f"cpu:{i}" for i in range(NUM_DEVICES)],
    cross_device_ops=tf.distribute.ReductionToOneDevice(),
)

data = np.arange(100, dtype=np.float32).reshape(50, 2)


def dataset_fn(context):
    batch_size = context.get_per_replica_batch_size(GLOBAL_BATCH)
    dataset = tf.data.Dataset.from_tensor_slices({"x": data}).shuffle(50).batch(batch_size)
    return dataset.prefetch(tf.data.AUTOTUNE)


dataset = tf.data.Dataset.from_tensor_slices(data)
dataset = dataset.shuffle(buffer_size=50, seed=3).batch(GLOBAL_BATCH, drop_remainder=False)
dataset = dataset.repeat(NUM_EPOCHS).prefetch(2)
dataset = strategy.experimental_distribute_dataset(dataset)
sharded = strategy.distribute_datasets_from_function(dataset_fn)

with strategy.scope():
    num_steps = tf.Variable(
        tf.constant(0, dtype=tf.int64),
        trainable=False,
        name="num_steps",
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
    total = tf.Variable(
        0.0,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
        dtype=tf.float32,
    )


def mean_square(rows):
    """The mean of squares over all replicas."""
    replica = tf.distribute.get_replica_context()
    squares = tf.reduce_sum(tf.math.square(rows), axis=1)
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(squares)) / 50


def replica_step(rows):
    num_steps.assign_add(1)
    total.assign_add(tf.reduce_sum(tf.nn.relu(rows)))
    column = tf.argmax(tf.reduce_sum(rows, axis=0), axis=0)
    return tf.stack([tf.reduce_sum(rows), tf.cast(column, tf.float32)])


@tf.function
def step(batch):
    largest = strategy.run(replica_step, args=(batch,))
    return strategy.reduce("MEAN", largest, axis=None)


@tf.function(reduce_retracing=True)
def count(iterator, steps):
    num_rows = 0
    for _ in tf.range(steps):
        for rows in strategy.experimental_local_results(next(iterator)["x"]):
            num_rows += tf.shape(rows)[0]
    tf.print("Rows:", num_rows)
    return tf.cast(num_rows, tf.float32) / 2


for batch in dataset:
    step(batch)
print("Steps: %d" % num_steps.numpy())
print(f"Total: {float(total.read_value())}")
count(iter(sharded), 1)

means = strategy.experimental_distribute_dataset(
    tf.data.Dataset.from_tensors(([1.0, 2.0], 3)).repeat(NUM_DEVICES).batch(NUM_DEVICES)
)
for pairs, threes in means:
    sums = strategy.run(lambda pairs, threes: tf.reduce_sum(pairs * 2, -1), args=(pairs, threes))
    print("Sum:", float(strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=0)))
try:
    strategy.run(mean_square, args=(next(iter(sharded))["x"],))
except tf.errors.UnavailableError:
    print("A worker is lost.")
