"""Training on the workers that TF_CONFIG names: start it once for each; any devices each."""

import json

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpudist

GLOBAL_BATCH, NUM_EPOCHS = 64, 4

rng = np.random.default_rng(0)
x = rng.normal(size=(500, 8)).astype(np.float32)  # 7 batches of 64 and one of 52
y = np.sin(x).sum(axis=1, keepdims=True).astype(np.float32)
w1 = (rng.normal(size=(8, 16)) / np.sqrt(8)).astype(np.float32)
w2 = (rng.normal(size=(16, 1)) / np.sqrt(16)).astype(np.float32)

tpudist.emulate(num_devices=4)  # of this worker; leave it out on TPUs and GPUs
strategy = tpudist.MultiWorkerMirroredStrategy()


class Regressor(nnx.Module):
    def __init__(self):
        self.w1, self.b1 = nnx.Param(jnp.asarray(w1)), nnx.Param(jnp.zeros(16))
        self.w2, self.b2 = nnx.Param(jnp.asarray(w2)), nnx.Param(jnp.zeros(1))

    def __call__(self, x):
        return jnp.tanh(x @ self.w1 + self.b1) @ self.w2 + self.b2


with strategy.scope():
    model = Regressor()
    optimizer = tpudist.Optimizer(optax.sgd(0.05, momentum=0.9), model)


def dataset_fn(context):
    """Every worker reads its own share of the examples."""
    shard = slice(context.input_pipeline_id, None, context.num_input_pipelines)
    dataset = tpudist.NumpyDataset((x[shard], y[shard]))
    return dataset.batch(context.get_per_replica_batch_size(GLOBAL_BATCH))


dataset = strategy.distribute_datasets_from_function(dataset_fn)


def replica_step(model, optimizer, x, y):
    def loss_fn(model):
        losses = jnp.sum((model(x) - y) ** 2, axis=1)
        return tpudist.compute_average_loss(losses)

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


@tpudist.function
def train_step(model, optimizer, batch):
    loss = strategy.run(replica_step, args=(model, optimizer, *batch))
    return strategy.reduce(tpudist.ReduceOp.SUM, loss, axis=None)


losses = [
    [float(train_step(model, optimizer, batch)) for batch in dataset] for _ in range(NUM_EPOCHS)
]
norm = float(optax.tree.norm(nnx.state(model, nnx.Param)))
task = strategy.cluster_resolver.task_id
print(json.dumps({"task": task, "losses": losses, "norm": norm}))
