"""A custom training loop with metrics, written for tf.distribute."""

import json

import numpy as np
import tensorflow as tf

NUM_REPLICAS, GLOBAL_BATCH, NUM_EPOCHS = 8, 64, 3

rng = np.random.default_rng(0)
x = rng.normal(size=(500, 8)).astype(np.float32)  # 7 batches of 64 and one of 52
y = np.argmax(x @ rng.normal(size=(8, 3)), axis=1).astype(np.int32)
w1 = (rng.normal(size=(8, 16)) / np.sqrt(8)).astype(np.float32)
w2 = (rng.normal(size=(16, 3)) / np.sqrt(16)).astype(np.float32)

[cpu] = tf.config.list_physical_devices("CPU")
devices = [tf.config.LogicalDeviceConfiguration()] * NUM_REPLICAS
tf.config.set_logical_device_configuration(cpu, devices)
strategy = tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(NUM_REPLICAS)])


class Classifier(tf.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.b1 = tf.Variable(w1), tf.Variable(tf.zeros(16))
        self.w2, self.b2 = tf.Variable(w2), tf.Variable(tf.zeros(3))

    def __call__(self, x):
        hidden = tf.nn.relu(x @ self.w1 + self.b1)
        return hidden @ self.w2 + self.b2


def sum_metric():
    return tf.Variable(
        0.0,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


with strategy.scope():
    model = Classifier()
    optimizer = tf.keras.optimizers.Adam(0.01, epsilon=1e-8)
    optimizer.build(model.trainable_variables)
    metrics = num_examples, loss_sum, num_correct = [sum_metric() for _ in range(3)]

dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL_BATCH)
dataset = strategy.experimental_distribute_dataset(dataset)


def per_example_loss(labels, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def replica_step(features, labels):
    with tf.GradientTape() as tape:
        logits = model(features)
        losses = per_example_loss(labels, logits)
        loss = tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    correct = tf.argmax(logits, axis=-1, output_type=tf.int32) == labels
    loss_sum.assign_add(tf.reduce_sum(losses))
    num_correct.assign_add(tf.reduce_sum(tf.cast(correct, tf.float32)))
    num_examples.assign_add(tf.cast(tf.size(labels), tf.float32))
    return loss


@tf.function
def train_step(batch):
    loss = strategy.run(replica_step, args=batch)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)


def replica_eval(features, labels):
    return per_example_loss(labels, model(features))


@tf.function
def eval_step(batch):
    losses = strategy.run(replica_eval, args=batch)
    return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=0)


results = {"step_losses": [], "epochs": []}
for _ in range(NUM_EPOCHS):
    for metric in metrics:
        metric.assign(0.0)
    for batch in dataset:
        results["step_losses"].append(float(train_step(batch)))
    n, total, correct = [float(metric.read_value()) for metric in metrics]
    results["epochs"].append({"examples": n, "loss": total / n, "accuracy": correct / n})

results["final_losses"] = [float(eval_step(batch)) for batch in dataset]
results["norm"] = float(tf.linalg.global_norm(model.trainable_variables))
print(json.dumps(results))
