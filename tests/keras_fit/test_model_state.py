"""`tpudist.checkpoint` saves and restores a Keras model for any split."""

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
def test_a_checkpoint_resumes_training_under_a_different_strategy(tmp_path, source, target):
    """Restores the optimizer state and the seeds of dropout."""
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


def restorable(compiled):
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.1)
    if compiled:
        model.compile(optimizer, "mse")
    return model, optimizer


@pytest.mark.slow
def test_models_and_optimizers_can_be_saved_directly(tmp_path):
    """Covers an optimizer that is built during restore, inside the model or separate."""
    x = np.ones((8, 3), np.float32)
    with tpudist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model, optimizer = restorable(compiled=True)
    model.fit(x, x[:, :2], verbose=0)
    path = Checkpoint(model=model, optimizer=optimizer, epoch=1).save(tmp_path / "ckpt")
    wanted = [np.asarray(v) for v in model.variables + optimizer.variables]
    for compiled in (True, False):
        model, optimizer = restorable(compiled)
        state = Checkpoint(model=model, optimizer=optimizer, epoch=0)
        report = state.restore(path).assert_consumed().report
        assert len(report.restored) == len(wanted) + 1
        assert (state.model, state.optimizer, state.epoch) == (model, optimizer, 1)
        for v, expected in zip(model.variables + optimizer.variables, wanted, strict=True):
            np.testing.assert_array_equal(v, expected)


@pytest.mark.slow
def test_keras_parts_in_pytrees_are_saved(tmp_path):
    def make(value):
        mean = keras.metrics.Mean()
        mean.update_state(float(value))
        layer = keras.layers.Dropout(0.5, seed=value)
        return {"m": [mean], "v": keras.Variable(value), "layer": layer}, {
            "seeds": keras.random.SeedGenerator(value),
            "layer": keras.layers.Embedding(2, 2),
        }

    tree, more = make(3)
    more["layer"].build()
    more["layer"].set_weights([np.full((2, 2), 3.0)])
    path = Checkpoint(tree=tree, more=more).write(tmp_path / "parts")
    other, others = make(5)
    others["layer"].build()
    Checkpoint(tree=other, more=others).read(path).assert_consumed()
    assert float(other["m"][0].result()) == 3
    assert int(other["v"]) == 3
    np.testing.assert_array_equal(other["layer"].seed_generator.state, [3, 0])
    np.testing.assert_array_equal(others["seeds"].state, [3, 0])
    np.testing.assert_array_equal(others["layer"].embeddings, np.full((2, 2), 3))


def test_an_optimizer_next_to_several_models_must_be_built(tmp_path):
    a, optimizer = restorable(compiled=False)
    b, _ = restorable(compiled=False)
    checkpoint = Checkpoint(a=a, b=b, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"has 2 models, so call optimizer.build\(model"):
        checkpoint.save(tmp_path / "x")
    optimizer.build(b.trainable_variables)
    checkpoint.save(tmp_path / "x")
    with pytest.raises(ValueError, match="'adam.*' is not built.* has 0 models"):
        Checkpoint(optimizer=keras.optimizers.Adam()).save(tmp_path / "y")


def test_unsupported_keras_objects_are_rejected(tmp_path):
    with pytest.raises(TypeError, match=r"these objects:\n  loss: keras\..*MeanSquaredError"):
        Checkpoint(loss=keras.losses.MeanSquaredError()).save(tmp_path / "x")


def test_a_callback_can_save_and_restore_within_an_epoch(tmp_path):
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


def test_a_model_without_variables_is_rejected(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1)], name="later")
    with pytest.raises(
        ValueError, match=r"'later' is not built.*Begin the model with an Input layer"
    ):
        CheckpointManager(Checkpoint(model=tpudist.keras.ModelState(model)), tmp_path).save(0)
