"""An unknown version of Keras raises an error that names the difference."""

import keras
import pytest

from tpudist.keras import keras_internals, keras_support


def test_the_installed_keras_is_supported():
    assert keras_support.find_problem() is None
    assert keras_support.problem is None


@pytest.mark.parametrize("version", ["3.14.2", "2.15.0"])
def test_an_old_keras_is_rejected(monkeypatch, version):
    monkeypatch.setattr(keras, "__version__", version)
    assert keras_support.find_problem().startswith(
        f"Keras is {version}, but a strategy's scope needs 3.15"
    )


def test_a_different_trainer_is_rejected(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.99.0")
    owner = keras_internals.trainer_class()

    def _make_function(self, step_function, concatenate_outputs=False, unroll=1):
        raise AssertionError

    monkeypatch.setattr(owner, "_make_function", _make_function)
    monkeypatch.delattr("keras.src.backend.jax.trainer._distribute_data")
    reason = keras_support.find_problem()
    assert reason.startswith("Keras 3.99.0 differs from the versions that tpudist knows (3.15)")
    assert "JAXTrainer._make_function has the parameters ('self', 'step_function'" in reason
    assert "there is no keras.src.backend.jax.trainer._distribute_data" in reason


def test_a_different_backend_is_rejected(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    assert 'KERAS_BACKEND to "jax" before you import Keras' in keras_support.find_problem()


def test_the_nnx_mode_of_keras_is_rejected(monkeypatch):
    monkeypatch.setattr(keras_internals, "is_nnx_enabled", lambda: True)
    assert "Keras was started with KERAS_NNX_ENABLED" in keras_support.find_problem()
