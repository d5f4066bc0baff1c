"""Replicas count and sum their examples, in a loop of steps."""

import numpy as np
import jax
import jax.numpy as jnp
import tpudist

NUM_DEVICES = 8
GLOBAL_BATCH = 32
NUM_EPOCHS = 2

tpudist.emulate(num_devices=NUM_DEVICES)
strategy = tpudist.MirroredStrategy(
    [f"cpu:{i}" for i in range(NUM_DEVICES)],
    cross_device_ops=tpudist.ReductionToOneDevice(),
)

data = np.arange(100, dtype=np.float32).reshape(50, 2)


def dataset_fn(context):
    batch_size = context.get_per_replica_batch_size(GLOBAL_BATCH)
    dataset = tpudist.NumpyDataset({"x": data}).shuffle(seed=0).batch(batch_size)
    return dataset


dataset = tpudist.NumpyDataset(data)
dataset = dataset.shuffle(seed=3).batch(GLOBAL_BATCH, drop_remainder=False)
dataset = dataset.repeat(NUM_EPOCHS)
dataset = strategy.experimental_distribute_dataset(dataset)
sharded = strategy.distribute_datasets_from_function(dataset_fn)

with strategy.scope():
    num_steps = tpudist.Variable(
        jnp.array(0, dtype=jnp.int64),
        trainable=False,
        name="num_steps",
        aggregation=tpudist.VariableAggregation.ONLY_FIRST_REPLICA,
    )
    total = tpudist.Variable(
        0.0,
        trainable=False,
        synchronization=tpudist.VariableSynchronization.ON_READ,
        aggregation=tpudist.VariableAggregation.SUM,
        dtype=jnp.float32,
    )


def mean_square(rows):
    """The mean of squares over all replicas."""
    replica = tpudist.get_replica_context()
    squares = jnp.sum(jnp.square(rows), axis=1)
    return replica.all_reduce(tpudist.ReduceOp.SUM, jnp.sum(squares)) / 50


def replica_step(rows):
    num_steps.assign_add(1)
    total.assign_add(jnp.sum(jax.nn.relu(rows)))
    column = jnp.argmax(jnp.sum(rows, axis=0), axis=0)
    return jnp.stack([jnp.sum(rows), jnp.astype(column, jnp.float32)])


def step(batch):
    largest = strategy.run(replica_step, args=(batch,))
    return strategy.reduce("MEAN", largest, axis=None)


def count(iterator, steps):
    num_rows = 0
    for _ in range(steps):
        for rows in strategy.experimental_local_results(next(iterator)["x"]):
            num_rows += rows.shape[0]
    print("Rows:", num_rows)
    return jnp.astype(num_rows, jnp.float32) / 2


for batch in dataset:
    step(batch)
print("Steps: %d" % num_steps.numpy())
print(f"Total: {float(total.read_value())}")
count(iter(sharded), 1)

means = strategy.experimental_distribute_dataset(
    tpudist.NumpyDataset(([[1.0, 2.0]] * NUM_DEVICES, [3] * NUM_DEVICES)).batch(NUM_DEVICES)
)
for pairs, threes in means:
    sums = strategy.run(lambda pairs, threes: jnp.sum(pairs * 2, -1), args=(pairs, threes))
    print("Sum:", float(strategy.reduce(tpudist.ReduceOp.SUM, sums, axis=0)))
try:
    strategy.run(mean_square, args=(next(iter(sharded))["x"],))
except tpudist.errors.UnavailableError:
    print("A worker is lost.")
