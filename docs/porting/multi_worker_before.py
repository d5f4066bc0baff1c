"""Training on the workers that TF_CONFIG names: start it once for each; one CPU device each."""

import json

import numpy as np
import tensorflow as tf

GLOBAL_BATCH, NUM_EPOCHS = 64, 4

rng = np.random.default_rng(0)
x = rng.normal(size=(500, 8)).astype(np.float32)  # 7 batches of 64 and one of 52
y = np.sin(x).sum(axis=1, keepdims=True).astype(np.float32)
w1 = (rng.normal(size=(8, 16)) / np.sqrt(8)).astype(np.float32)
w2 = (rng.normal(size=(16, 1)) / np.sqrt(16)).astype(np.float32)

strategy = tf.distribute.MultiWorkerMirroredStrategy()


class Regressor(tf.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.b1 = tf.Variable(w1), tf.Variable(tf.zeros(16))
        self.w2, self.b2 = tf.Variable(w2), tf.Variable(tf.zeros(1))

    def __call__(self, x):
        return tf.tanh(x @ self.w1 + self.b1) @ self.w2 + self.b2


with strategy.scope():
    model = Regressor()
    optimizer = tf.keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)


def dataset_fn(context):
    """Every worker reads its own share of the examples."""
    shard = slice(context.input_pipeline_id, None, context.num_input_pipelines)
    dataset = tf.data.Dataset.from_tensor_slices((x[shard], y[shard]))
    return dataset.batch(context.get_per_replica_batch_size(GLOBAL_BATCH))


dataset = strategy.distribute_datasets_from_function(dataset_fn)


def replica_step(x, y):
    replica = tf.distribute.get_replica_context()
    num_examples = replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.shape(x)[0])
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum((model(x) - y) ** 2, axis=1)
        loss = tf.nn.compute_average_loss(losses, global_batch_size=num_examples)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def train_step(batch):
    loss = strategy.run(replica_step, args=batch)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)


losses = [[float(train_step(batch)) for batch in dataset] for _ in range(NUM_EPOCHS)]
norm = float(tf.linalg.global_norm(model.trainable_variables))
task = strategy.cluster_resolver.task_id
print(json.dumps({"task": task, "losses": losses, "norm": norm}))
