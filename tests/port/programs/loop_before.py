"""A custom loop over a Keras model: gradient tape, optimizer and metrics."""

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 4)).astype("float32")
y = x @ np.array([[1.0], [-2.0], [3.0], [0.5]], "float32")

strategy = tf.distribute.MirroredStrategy()
GLOBAL_BATCH_SIZE = 16

dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL_BATCH_SIZE)
dataset = strategy.experimental_distribute_dataset(dataset)


def create_model():
    regularizer = tf.keras.regularizers.L2(1e-3)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Dense(8, kernel_initializer="ones", kernel_regularizer=regularizer),
            tf.keras.layers.Dense(1, kernel_initializer="ones"),
        ]
    )


with strategy.scope():
    model = create_model()
    optimizer = tf.keras.optimizers.SGD(learning_rate=0.01, momentum=0.9)
    loss_object = tf.keras.losses.MeanSquaredError(reduction=tf.keras.losses.Reduction.NONE)
    error = tf.keras.metrics.MeanAbsoluteError(name="error")
    test_loss = tf.keras.metrics.Mean(name="test_loss")


def compute_loss(labels, predictions, model_losses):
    per_example_loss = loss_object(labels, predictions)
    loss = tf.nn.compute_average_loss(per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE)
    if model_losses:
        loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
    return loss


def train_step(inputs):
    features, labels = inputs

    with tf.GradientTape() as tape:
        predictions = model(features, training=True)
        loss = compute_loss(labels, predictions, model.losses)

    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    error.update_state(labels, predictions)
    return loss


def test_step(inputs):
    features, labels = inputs
    predictions = model(features, training=False)
    test_loss.update_state(loss_object(labels, predictions))


@tf.function
def distributed_train_step(inputs):
    losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


@tf.function
def distributed_test_step(inputs):
    return strategy.run(test_step, args=(inputs,))


for epoch in range(3):
    total_loss = 0.0
    num_batches = 0
    for batch in dataset:
        total_loss += distributed_train_step(batch)
        num_batches += 1
    for batch in dataset:
        distributed_test_step(batch)
    template = "Epoch {}: loss {:.3f}, error {:.3f}, test loss {:.3f}"
    print(
        template.format(
            epoch + 1,
            float(total_loss) / num_batches,
            float(error.result()),
            float(test_loss.result()),
        )
    )
    error.reset_state()
    test_loss.reset_state()
