"""A Keras model is saved and restored through `tpudist.checkpoint`, whatever it is split over."""

import keras
import numpy as np
import pytest

import keras_models as km
import tpudist
from tpudist.checkpoint import Checkpoint, CheckpointManager


def split(axis):
    strategy = tpudist.TPUStrategy(replica_axes={"tensor": 2})
    tpudist.keras.set_layout_map(strategy, {".*/dense.*/kernel": axis})
    return strategy


PLACES = {
    "mirrored": tpudist.MirroredStrategy,
    "split": lambda: split(("tensor", None)),
    "two devices": lambda: tpudist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "no strategy": lambda: None,
}
X, Y = km.IMAGES[:60], km.LABELS[:60]


def noisy(**options):
    layers = [keras.layers.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([*layers, keras.layers.Dense(16, "tanh"), keras.layers.Dense(5)])
    model.compile("adam", km.cross_entropy(), **options)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("mirrored", "split"),
        ("split", "no strategy"),
        pytest.param("no strategy", "two devices", marks=pytest.mark.exhaustive),
        pytest.param("split", "mirrored", marks=pytest.mark.exhaustive),
    ],
)
def test_training_goes_on_elsewhere_as_it_would_have(tmp_path, source, target):
    """With the optimizer's state, and the masks of dropout."""
    model = km.make(noisy, PLACES[source]())
    model.fit(X, Y, batch_size=60, epochs=2, verbose=0)
    with CheckpointManager(Checkpoint(model=tpudist.keras.ModelState(model)), tmp_path) as manager:
        manager.save(2)
    wanted = km.train(model, X, Y, 60, epochs=1, shuffle=False)

    keras.utils.set_random_seed(77)
    other = PLACES[target]()
    restored = km.make(noisy, other)
    with CheckpointManager(Checkpoint(model=tpudist.keras.ModelState(restored)), tmp_path) as m:
        m.restore()
    assert int(restored.optimizer.iterations) == 2
    km.assert_same(km.train(restored, X, Y, 60, epochs=1, shuffle=False), wanted)


def test_a_callback_saves_and_restores_in_the_middle_of_an_epoch(tmp_path):
    model = km.make(noisy, tpudist.MirroredStrategy())
    state = Checkpoint(model=tpudist.keras.ModelState(model))
    kernels = []

    class Saves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                manager.save(0)
                kernels.append(np.asarray(model.layers[2].kernel.value))
            if batch == 2:
                manager.restore()
                kernels.append(np.asarray(model.layers[2].kernel.value))

    with CheckpointManager(state, tmp_path) as manager:
        model.fit(X, Y, batch_size=20, verbose=0, callbacks=[Saves()])
    np.testing.assert_array_equal(*kernels)


def test_a_model_without_variables_is_refused(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1)], name="later")
    with pytest.raises(ValueError, match=r"'later' is not built.*Give it an Input layer"):
        CheckpointManager(Checkpoint(model=tpudist.keras.ModelState(model)), tmp_path).save(0)
