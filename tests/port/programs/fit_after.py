"""Keras trains a classifier on all devices, then is evaluated, saved and loaded."""

import os
import tempfile

import numpy as np

os.environ["KERAS_BACKEND"] = "jax"

import keras
import tpudist
from keras import layers
from keras.callbacks import EarlyStopping

BATCH_SIZE_PER_REPLICA = 8

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 8)).astype("float32")
y = np.argmax(x @ rng.normal(size=(8, 3)), axis=1)

strategy = tpudist.MirroredStrategy()
print("Number of devices: {}".format(strategy.num_replicas_in_sync))
batch_size = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync


class Scale(layers.Layer):
    """Divides by the root of the sum of squares."""

    def call(self, inputs):
        squares = keras.ops.sum(keras.ops.square(inputs), axis=(-1,), keepdims=True)
        return inputs * keras.ops.rsqrt(keras.ops.cast(squares, "float32") + 1e-6)


class PrintRate(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        print("Learning rate: {}".format(self.model.optimizer.learning_rate.numpy()))


with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input(shape=(8,), dtype="float32"),
            Scale(),
            layers.Dense(16, activation="relu"),
            keras.layers.Dense(3),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate=0.5),
        loss=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="sum_over_batch_size"
        ),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
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
accuracy_again = keras.metrics.SparseCategoricalAccuracy()
accuracy_again.update_state(y, model.predict(x, batch_size=batch_size, verbose=0))
print("Same accuracy:", abs(float(accuracy_again.result()) - accuracy) < 1e-5)
accuracy_again.reset_state()
