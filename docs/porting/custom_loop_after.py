"""A custom training loop with metrics, ported to tpudist."""

import json

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpudist

NUM_REPLICAS, GLOBAL_BATCH, NUM_EPOCHS = 8, 64, 3

rng = np.random.default_rng(0)
x = rng.normal(size=(500, 8)).astype(np.float32)  # 7 batches of 64 and one of 52
y = np.argmax(x @ rng.normal(size=(8, 3)), axis=1).astype(np.int32)
w1 = (rng.normal(size=(8, 16)) / np.sqrt(8)).astype(np.float32)
w2 = (rng.normal(size=(16, 3)) / np.sqrt(16)).astype(np.float32)

tpudist.emulate(num_devices=NUM_REPLICAS)  # leave it out on TPUs and GPUs
strategy = tpudist.MirroredStrategy()


class Classifier(nnx.Module):
    def __init__(self):
        self.w1, self.b1 = nnx.Param(jnp.asarray(w1)), nnx.Param(jnp.zeros(16))
        self.w2, self.b2 = nnx.Param(jnp.asarray(w2)), nnx.Param(jnp.zeros(3))

    def __call__(self, x):
        hidden = nnx.relu(x @ self.w1 + self.b1)
        return hidden @ self.w2 + self.b2


def sum_metric():
    return tpudist.Variable(
        0.0,
        trainable=False,
        synchronization=tpudist.VariableSynchronization.ON_READ,
        aggregation=tpudist.VariableAggregation.SUM,
    )


with strategy.scope():
    model = Classifier()
    optimizer = tpudist.Optimizer(optax.adam(0.01, eps=1e-8), model)
    metrics = num_examples, loss_sum, num_correct = [sum_metric() for _ in range(3)]

dataset = strategy.experimental_make_numpy_dataset((x, y)).batch(GLOBAL_BATCH)
dataset = strategy.experimental_distribute_dataset(dataset)


def per_example_loss(labels, logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def replica_step(model, optimizer, features, labels):
    def loss_fn(model):
        logits = model(features)
        losses = per_example_loss(labels, logits)
        loss = tpudist.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        return loss, (losses, logits)

    (loss, (losses, logits)), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    correct = jnp.argmax(logits, axis=-1) == labels
    loss_sum.assign_add(jnp.sum(losses))
    num_correct.assign_add(jnp.sum(correct, dtype=jnp.float32))
    num_examples.assign_add(jnp.float32(labels.shape[0]))
    return loss


@tpudist.function
def train_step(model, optimizer, batch):
    loss = strategy.run(replica_step, args=(model, optimizer, *batch))
    return strategy.reduce(tpudist.ReduceOp.SUM, loss, axis=None)


def replica_eval(model, features, labels):
    return per_example_loss(labels, model(features))


@tpudist.function
def eval_step(model, batch):
    losses = strategy.run(replica_eval, args=(model, *batch))
    return strategy.reduce(tpudist.ReduceOp.MEAN, losses, axis=0)


results = {"step_losses": [], "epochs": []}
for _ in range(NUM_EPOCHS):
    for metric in metrics:
        metric.assign(0.0)
    for batch in dataset:
        results["step_losses"].append(float(train_step(model, optimizer, batch)))
    n, total, correct = [float(metric.read_value()) for metric in metrics]
    results["epochs"].append({"examples": n, "loss": total / n, "accuracy": correct / n})

results["final_losses"] = [float(eval_step(model, batch)) for batch in dataset]
results["norm"] = float(optax.tree.norm(nnx.state(model, nnx.Param)))
print(json.dumps(results))
