"""A custom loop with a checkpoint, which must be ported manually."""

import jax
import jax.numpy as jnp
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
import tensorflow as tf
import tpudist

strategy = tpudist.MirroredStrategy()

with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    loss_object = keras.losses.MeanSquaredError(reduction="none")
    mean_loss = keras.metrics.Mean()
    # tpudist port: tf.train.Checkpoint (docs/porting.md#checkpoints)
    checkpoint = tf.train.Checkpoint(model)

dataset = tf.data.Dataset.range(64).map(lambda i: tf.reshape(tf.cast(i, tf.float32), (1,)))
dataset = strategy.experimental_distribute_dataset(dataset.batch(16))


def compute_loss(labels, predictions):
    losses = loss_object(labels, predictions)
    loss = tpudist.compute_average_loss(losses, global_batch_size=16)
    return loss + tpudist.scale_regularization_loss(sum([jnp.array(0.0)]))


@tpudist.function
def train_step(inputs):
    def step_fn(inputs):
        def loss_of_batch():
            loss = compute_loss(2 * inputs, model(inputs))
            return loss

        loss, gradients = tpudist.keras.value_and_grad(loss_of_batch, model)()
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        mean_loss.update_state(loss)
        return jnp.mean(loss)

    losses = strategy.run(step_fn, args=(inputs,))
    return strategy.reduce(tpudist.ReduceOp.SUM, losses, axis=None)


for batch in dataset:
    if not [x for x in jax.devices() if x.platform == "gpu"]:
        print(np.asarray(train_step(batch))[()])
# tpudist port: tf.debugging.assert_equal (docs/debugging.md)
tf.debugging.assert_equal(1, 1)
checkpoint.save("/tmp/checkpoint")
mean_loss.reset_state()
