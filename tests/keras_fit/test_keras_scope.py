"""Keras and a strategy's scope work in any order of import, or raise a clear error."""

import os
import subprocess
import sys
import textwrap

import pytest

from places import ROOT


def run(program, **env):
    """Runs a separate program, which must succeed; returns its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"KERAS_BACKEND": "jax", "PYTHONPATH": str(ROOT)} | env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_keras_may_be_imported_after_the_scope_was_entered():
    printed = run("""
        import sys
        import numpy as np, tpudist
        tpudist.emulate(8)
        strategy = tpudist.MirroredStrategy()
        with strategy.scope():
            assert "keras" not in sys.modules
            import keras
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((13, 4)), np.ones((13, 1)), batch_size=13, verbose=0)
        print(len(model.layers[0].kernel.value.sharding.device_set))
        print(keras.distribution.distribution())
    """)
    assert printed.split() == ["8", "None"]


@pytest.mark.slow
def test_another_keras_backend_is_rejected_only_when_a_model_trains():
    """A program may import Keras without using it in the scope."""
    printed = run(
        """
        import keras, numpy as np, jax.numpy as jnp, tpudist
        tpudist.emulate(8)
        strategy = tpudist.MirroredStrategy()
        with strategy.scope():
            print(strategy.run(lambda: jnp.ones(())))
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
            for method in (model.fit, model.predict, model.train_on_batch, model.compile):
                try:
                    method(np.ones((8, 4)))
                except RuntimeError as error:
                    print(error)
        print(model.predict(np.ones((8, 4)), verbose=0).shape)
        """,
        KERAS_BACKEND="numpy",
    )
    lines = printed.splitlines()
    assert lines[0] == "1.0"
    refused = ["fit", "predict", "train_on_batch", "compile"]
    assert [line.split(" of a Keras")[0] for line in lines[1:5]] == refused
    assert (
        "Keras computes with numpy, but the strategy's devices belong to JAX. Set the" in lines[1]
    )
    assert lines[5] == "(8, 1)"
