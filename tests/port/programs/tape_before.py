"""A custom loop with a checkpoint, which must be ported manually."""

import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()

with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.SGD(0.1)
    loss_object = tf.keras.losses.MeanSquaredError(reduction=tf.keras.losses.Reduction.NONE)
    mean_loss = tf.keras.metrics.Mean()
    checkpoint = tf.train.Checkpoint(model)

dataset = tf.data.Dataset.range(64).map(lambda i: tf.reshape(tf.cast(i, tf.float32), (1,)))
dataset = strategy.experimental_distribute_dataset(dataset.batch(16))


def compute_loss(labels, predictions):
    losses = loss_object(labels, predictions)
    loss = tf.nn.compute_average_loss(losses, global_batch_size=16)
    return loss + tf.nn.scale_regularization_loss(tf.add_n([tf.constant(0.0)]))


@tf.function
def train_step(inputs):
    def step_fn(inputs):
        with tf.GradientTape() as tape:
            loss = compute_loss(2 * inputs, model(inputs))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        mean_loss.update_state(loss)
        return tf.reduce_mean(loss)

    losses = strategy.run(step_fn, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


for batch in dataset:
    if not tf.config.list_physical_devices("GPU"):
        print(train_step(batch).numpy())
tf.debugging.assert_equal(1, 1)
checkpoint.save("/tmp/checkpoint")
mean_loss.reset_states()
