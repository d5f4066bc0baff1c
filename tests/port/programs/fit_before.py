"""Keras trains a classifier on all devices, then is evaluated, saved and loaded."""

import os
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers
from tensorflow.keras.callbacks import EarlyStopping

BATCH_SIZE_PER_REPLICA = 8

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 8)).astype("float32")
y = np.argmax(x @ rng.normal(size=(8, 3)), axis=1)

strategy = tf.distribute.MirroredStrategy()
print("Number of devices: {}".format(strategy.num_replicas_in_sync))
batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync


class Scale(layers.Layer):
    """Divides by the root of the sum of squares."""

    def call(self, inputs):
        squares = tf.reduce_sum(tf.square(inputs), axis=[-1], keepdims=True)
        return inputs * tf.math.rsqrt(tf.cast(squares, tf.float32) + 1e-6)


class PrintRate(tf.keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        print("Learning rate: {}".format(self.model.optimizer.learning_rate.numpy()))


with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(8,), dtype=tf.float32),
            Scale(),
            layers.Dense(16, activation="relu"),
            tf.keras.layers.Dense(3),
        ]
    )
    model.compile(
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.5),
        loss=tf.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=tf.keras.losses.Reduction.SUM_OVER_BATCH_SIZE
        ),
        metrics=[tf.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )

history = model.fit(
    x,
    y,
    batch_size=batch_size,
    epochs=3,
    verbose=0,
    callbacks=[PrintRate(), EarlyStopping(monitor="loss")],
)
losses = history.history["loss"]
print("Losses fall:", losses[-1] < losses[0])

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model.weights.h5")
    model.save_weights(path)
    model.load_weights(path)

loss, accuracy = model.evaluate(x, y, batch_size=batch_size, verbose=0)
accuracy_again = tf.keras.metrics.SparseCategoricalAccuracy()
accuracy_again.update_state(y, model.predict(x, batch_size=batch_size, verbose=0))
print("Same accuracy:", abs(float(accuracy_again.result()) - accuracy) < 1e-5)
accuracy_again.reset_state()
