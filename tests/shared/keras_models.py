"""Keras models, and what training makes of them: to be equal in a scope and on one device."""

import contextlib
import re

import keras
import numpy as np
from keras import layers

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(199, 6, 6, 1)).astype("float32")
LABELS = RNG.integers(0, 5, 199).astype("int32")
TOKENS = RNG.integers(0, 50, (199, 8)).astype("int32")
BITS = RNG.integers(0, 2, (199, 1)).astype("float32")


class Rows(keras.metrics.Metric):
    """Counts the rows it sees, without regard to weights: one of padding would count."""

    def __init__(self, name="rows"):
        super().__init__(name=name)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

    def result(self):
        return self.count * 1


def cross_entropy(reduction="sum_over_batch_size"):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def mlp(optimizer="sgd", loss=None, **options):
    """A smooth model: two devices' order of additions does not grow into another result."""
    model = keras.Sequential(
        [
            layers.Input((6, 6, 1)),
            layers.Flatten(),
            layers.Dense(16, "tanh", kernel_regularizer="l2"),
            layers.Dense(5),
        ]
    )
    options = {"metrics": ["accuracy", Rows()]} | options
    model.compile(optimizer, loss or cross_entropy(), **options)
    return model


def convolutions(**options):
    """A model with every layer that depends on the whole batch, and noise."""
    model = keras.Sequential(
        [
            layers.Input((6, 6, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.GroupNormalization(2),
            layers.SpatialDropout2D(0.2),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(5),
        ]
    )
    model.compile("sgd", cross_entropy(), metrics=["accuracy"], **options)
    return model


def bag(**options):
    """The mean of embeddings: gradients of a gather."""
    model = keras.Sequential(
        [
            layers.Input((8,), dtype="int32"),
            layers.Embedding(50, 8),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, "sigmoid"),
        ]
    )
    metrics = [keras.metrics.AUC(), keras.metrics.F1Score(threshold=0.5)]
    model.compile("sgd", "binary_crossentropy", metrics=metrics, **options)
    return model


def lstm(**options):
    model = keras.Sequential(
        [
            layers.Input((8,), dtype="int32"),
            layers.Embedding(50, 8, mask_zero=True),
            layers.LSTM(8),
            layers.Dense(1, "sigmoid"),
        ]
    )
    model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.AUC()], **options)
    return model


def make(build, strategy=None, policy="float32", **options):
    """The model of `build`, with the same weights each time; in the scope, if there is one."""
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            return build(**options)
    finally:
        keras.config.set_dtype_policy("float32")


def train(model, x, y, batch_size, *, epochs=2, seed=2, **options):
    """Arrays that `fit` and the other methods return, by name."""
    keras.utils.set_random_seed(seed)
    history = model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=0, **options).history
    found = {_unnumbered(name): np.asarray(value) for name, value in history.items()}
    found |= {f"weight {i} {w.name}": np.asarray(w.value) for i, w in enumerate(model.weights)}
    return found


def use(model, x, y, batch_size):
    """Results of evaluation and prediction, on datasets and on single batches."""
    found = {
        "evaluate": model.evaluate(x, y, batch_size=batch_size, verbose=0),
        "predict": model.predict(x, batch_size=batch_size, verbose=0),
        "train_on_batch": model.train_on_batch(x[:5], y[:5]),
        "test_on_batch": model.test_on_batch(x[:5], y[:5]),
        "predict_on_batch": model.predict_on_batch(x[:5]),
    }
    return {name: np.asarray(np.hstack(value)) for name, value in found.items()}


def assert_same(found, wanted, rtol=1e-5, atol=1e-6):
    """Element by element; 1e-6 is rounding of sums of the sizes there are."""
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=atol, err_msg=name)


def _unnumbered(name):
    """Keras numbers the metrics of a process."""
    return re.sub(r"_\d+$", "", name)
