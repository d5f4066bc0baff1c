"""Synchronous batch normalisation with merge_call and with all_reduce, ported to tpudist."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpudist

NUM_REPLICAS, GLOBAL_BATCH, NUM_EPOCHS, MOMENTUM, LEARNING_RATE = 8, 64, 3, 0.9, 0.1

rng = np.random.default_rng(0)
x = (3 * rng.normal(size=(240, 4)) + 5).astype(np.float32)  # 3 batches of 64 and one of 48
y = np.tanh(x - 5).sum(axis=1, keepdims=True).astype(np.float32)
w = rng.normal(size=(4, 6)).astype(np.float32)
v = rng.normal(size=(6, 1)).astype(np.float32)

tpudist.emulate(num_devices=NUM_REPLICAS)  # leave it out on TPUs and GPUs
strategy = tpudist.MirroredStrategy()


def sum_by_merge_call(*values):
    """The sum over all replicas; its gradient is the sum of the replicas' gradients."""

    def merge(strategy, *values):
        pairs = [(value, value) for value in values]
        return strategy.extended.batch_reduce_to(tpudist.ReduceOp.SUM, pairs)

    return tpudist.get_replica_context().merge_call(merge, args=values)


def sum_by_all_reduce(*values):
    return tpudist.get_replica_context().all_reduce(tpudist.ReduceOp.SUM, list(values))


class SyncBatchNorm:
    def __init__(self, num_features, sum_over_replicas):
        self.sum_over_replicas = sum_over_replicas
        mean = tpudist.VariableAggregation.MEAN
        self.scale = tpudist.Variable(jnp.ones(num_features))
        self.offset = tpudist.Variable(jnp.zeros(num_features))
        self.moving_mean = tpudist.Variable(
            jnp.zeros(num_features), trainable=False, aggregation=mean
        )
        self.moving_variance = tpudist.Variable(
            jnp.ones(num_features),
            synchronization=tpudist.VariableSynchronization.ON_READ,
            aggregation=mean,
        )

    def __call__(self, x, scale, offset):
        sums = [jnp.asarray(x.shape[0], x.dtype), x.sum(axis=0), (x**2).sum(axis=0)]
        rows, total, squares = self.sum_over_replicas(*sums)
        mean = total / rows
        variance = squares / rows - mean**2
        normal = (x - mean) * jax.lax.rsqrt(variance + 1e-3)
        return normal * scale + offset, (mean, variance)

    def update(self, mean, variance):
        for moving, new in (self.moving_mean, mean), (self.moving_variance, variance):
            moving.assign(MOMENTUM * moving + (1 - MOMENTUM) * new)

    def infer(self, x):
        normal = (x - self.moving_mean) * jax.lax.rsqrt(self.moving_variance + 1e-3)
        return normal * self.scale + self.offset


def train(sum_over_replicas):
    with strategy.scope():
        first, last = tpudist.Variable(w), tpudist.Variable(v)
        norm = SyncBatchNorm(6, sum_over_replicas)
    trained = [first, norm.scale, norm.offset, last]
    dataset = strategy.experimental_make_numpy_dataset((x, y)).batch(GLOBAL_BATCH)
    dataset = strategy.experimental_distribute_dataset(dataset)

    def replica_step(x, y):
        replica = tpudist.get_replica_context()

        def loss_fn(values):
            first, scale, offset, last = values
            hidden, statistics = norm(x @ first, scale, offset)
            predicted = jax.nn.relu(hidden) @ last
            losses = jnp.sum((predicted - y) ** 2, axis=1)
            return tpudist.compute_average_loss(losses), statistics

        values = [variable.read_value() for variable in trained]
        (loss, statistics), gradients = jax.value_and_grad(loss_fn, has_aux=True)(values)
        norm.update(*statistics)
        gradients = replica.all_reduce(tpudist.ReduceOp.SUM, gradients)
        for variable, gradient in zip(trained, gradients, strict=True):
            variable.assign_sub(LEARNING_RATE * gradient)
        return loss, gradients[0]

    @tpudist.function
    def train_step(batch):
        loss, gradient = strategy.run(replica_step, args=batch)
        loss = strategy.reduce(tpudist.ReduceOp.SUM, loss, axis=None)
        return loss, strategy.reduce(tpudist.ReduceOp.MEAN, gradient, axis=None)

    steps = [train_step(batch) for _ in range(NUM_EPOCHS) for batch in dataset]
    predicted = jax.nn.relu(norm.infer(x @ first)) @ last
    return {
        "losses": [float(loss) for loss, _ in steps],
        "gradient_norms": [float(jnp.linalg.norm(gradient)) for _, gradient in steps],
        "moving_mean": norm.moving_mean.numpy().tolist(),
        "moving_variance": norm.moving_variance.read_value().tolist(),
        "final": float(jnp.mean((predicted - y) ** 2)),
        "norm": float(optax.tree.norm([variable.read_value() for variable in trained])),
    }


results = {"merge_call": train(sum_by_merge_call), "all_reduce": train(sum_by_all_reduce)}
print(json.dumps(results))
