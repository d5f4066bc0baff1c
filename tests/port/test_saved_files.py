"""Paths of saved models and weights: the port corrects or lists the paths that Keras 3 rejects."""

import os
import subprocess
import sys

import pytest

from places import ROOT
from tpudist.port import port_program
from tpudist.port.guide_sections import (
    LOAD_STATUS,
    LOADED_PATH,
    MODEL_PATH,
    SAVE_ARGUMENT,
    WEIGHTS_PATH,
)

HEAD = """import os
import pathlib
import tensorflow as tf
from tensorflow import keras
strategy = tf.distribute.MirroredStrategy()
model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
"""
BODY = "model = keras.Sequential([keras.layers.Dense(1)])\n"
WEIGHTS_ONLY = "save_weights_only=True)"


def port(statements: str) -> tuple[str, list[tuple[str, str]]]:
    """Returns the statements after the port, and the name and advice of each leftover."""
    ported = port_program(HEAD + statements)
    assert port_program(ported.source) == ported
    _, _, after = ported.source.partition(BODY)
    return after, [(one.name, one.instruction) for one in ported.leftovers]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('model.save("out")', 'model.save("out.keras")'),
        ('model.save(r"out/", save_format="tf")', 'model.save(r"out.keras")'),
        ("model.save(filepath='a.tf')", "model.save(filepath='a.keras')"),
        ('keras.models.save_model(model, "out")', 'keras.models.save_model(model, "out.keras")'),
        ('model.save_weights("reg.h5")', 'model.save_weights("reg.weights.h5")'),
        ('model.save_weights("w")', 'model.save_weights("w.weights.h5")'),
        ('model.save_weights("w", save_format="h5")', 'model.save_weights("w.weights.h5")'),
        ('model.save_weights("a/" "b.ckpt")', 'model.save_weights("a/" "b.weights.h5")'),
        (
            'keras.callbacks.ModelCheckpoint("ck/{epoch}")',
            'keras.callbacks.ModelCheckpoint("ck/{epoch}.keras")',
        ),
        (
            f'keras.callbacks.ModelCheckpoint("ck/{{epoch}}", {WEIGHTS_ONLY}',
            f'keras.callbacks.ModelCheckpoint("ck/{{epoch}}.weights.h5", {WEIGHTS_ONLY}',
        ),
        ('model.save(f"{folder}/out")', 'model.save(f"{folder}/out.keras")'),
        ('model.save(f"ck/{epoch:03d}")', 'model.save(f"ck/{epoch:03d}.keras")'),
        ('model.save(folder + "/out")', 'model.save(folder + "/out.keras")'),
        ('model.save("ck/%d" % epoch)', 'model.save("ck/%d.keras" % epoch)'),
        ('model.save("out_{}.tf".format(i))', 'model.save("out_{}.keras".format(i))'),
        ('model.save(os.path.join(a, "out"))', 'model.save(os.path.join(a, "out.keras"))'),
        ('model.save(pathlib.Path(a) / "out")', 'model.save(pathlib.Path(a) / "out.keras")'),
        # Loads of the same file.
        (
            'model.save_weights("reg.h5")\nmodel.load_weights("reg.h5")',
            'model.save_weights("reg.weights.h5")\nmodel.load_weights("reg.weights.h5")',
        ),
        (
            "model.save('a/out')\nkeras.models.load_model(\"a/out\")",
            "model.save('a/out.keras')\nkeras.models.load_model(\"a/out.keras\")",
        ),
        (
            'c = keras.callbacks.ModelCheckpoint("a.hdf5")\nmodel.load_weights("a.hdf5")',
            'c = keras.callbacks.ModelCheckpoint("a.keras")\nmodel.load_weights("a.keras")',
        ),
        (
            f'c = keras.callbacks.ModelCheckpoint("w{{epoch}}.h5", {WEIGHTS_ONLY}\n'
            'model.load_weights("w12.h5")',
            f'c = keras.callbacks.ModelCheckpoint("w{{epoch}}.weights.h5", {WEIGHTS_ONLY}\n'
            'model.load_weights("w12.weights.h5")',
        ),
        (
            'model.save_weights("w%(i)02d.h5" % d)\nmodel.load_weights("w12.h5")',
            'model.save_weights("w%(i)02d.weights.h5" % d)\nmodel.load_weights("w12.weights.h5")',
        ),
        (
            'path = "out"\nif os.path.exists(path):\n    keras.models.load_model(path)\n'
            "model.save(path)",
            'path = "out.keras"\nif os.path.exists(path):\n    keras.models.load_model(path)\n'
            "model.save(path)",
        ),
    ],
)
def test_a_path_is_corrected_in_each_call(before, after):
    assert port(before + "\n") == (after + "\n", [])


@pytest.mark.parametrize(
    "statements",
    [
        'model.save("m.keras")\nmodel.save("m.h5")\nmodel.save("m.hdf5")',
        'model.save_weights("m.weights.h5")\nkeras.models.load_model("m.h5")',
        'model.load_weights("old.h5")\nmodel.load_weights("old.keras")',
        'keras.callbacks.ModelCheckpoint("m.h5")',
        # Unknown values, or objects that are not from Keras.
        "model.save(path)\nmodel.save_weights(args.path)\nmodel.save(f'out{suffix}')",
        'model.save("out%s" % suffix)\nmodel.save("out%(suffix)s" % options)',
        "path = 'a' if x else 'b.keras'\nmodel.save(path)",
        'image.save("x")\nmodel_saver.save("x")',
    ],
)
def test_a_path_that_may_be_right_stays(statements):
    assert port(statements + "\n") == (statements + "\n", [])


@pytest.mark.parametrize(
    ("statements", "left"),
    [
        # Another reader of the file.
        ('model.save("out")\nos.listdir("out")', [("model.save", MODEL_PATH)]),
        ('path = "out"\nmodel.save(path)\nos.listdir(path)', [("model.save", MODEL_PATH)]),
        (
            'model.save_weights("w.h5")\nmodel.load_weights(path)',
            [("model.save_weights", WEIGHTS_PATH)],
        ),
        (
            'model.save_weights(f"w{i}.h5")\nmodel.load_weights("w3.h5")',
            [("model.save_weights", WEIGHTS_PATH)],
        ),
        (
            'model.save_weights(f"a{i}/w{j}.h5")\nmodel.load_weights("a1/w3.h5")',
            [("model.save_weights", WEIGHTS_PATH)],
        ),
        (
            'model.save_weights("w.h5")\nmodel.load_weights("w.h5", by_name=True)',
            [("model.save_weights", WEIGHTS_PATH)],
        ),
        # Two files would have the same name.
        (
            'model.save_weights("w")\nmodel.save_weights("w.h5")',
            [("model.save_weights", WEIGHTS_PATH), ("model.save_weights", WEIGHTS_PATH)],
        ),
        # A file that the program does not write.
        ('model.load_weights("w")', [("model.load_weights", LOADED_PATH)]),
        (
            "model.load_weights(tf.train.latest_checkpoint('ck'))",
            [("model.load_weights", LOADED_PATH)],
        ),
        # Uncertain objects and arguments.
        ("new_model = make()\nnew_model.save('out')", [("new_model.save", MODEL_PATH)]),
        (
            "tf.keras.callbacks.ModelCheckpoint('out', save_weights_only=flag)",
            [("keras.callbacks.ModelCheckpoint", MODEL_PATH)],
        ),
        ("model.load_weights('a.h5').expect_partial()", [("model.load_weights", LOAD_STATUS)]),
    ],
)
def test_a_path_that_keras_rejects_is_listed_if_the_correction_is_not_certain(statements, left):
    assert port(statements + "\n")[1] == [(name, advice.instruction) for name, advice in left]


def test_an_argument_that_keras_rejects_is_listed():
    _, [(name, what)] = port("model.save('a.keras', options=x, signatures=y)\n")
    assert name == "model.save"
    assert what == SAVE_ARGUMENT.instruction.format("options, signatures")


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_program_whose_paths_are_corrected_saves_and_loads(tmp_path):
    pytest.importorskip("keras")
    source = HEAD.replace("layers.Dense(1)", "Input((2,)), tf.keras.layers.Dense(1)") + (
        "import numpy as np\n"
        "model.compile('sgd', 'mse')\n"
        "save = tf.keras.callbacks.ModelCheckpoint('ck/{epoch}')\n"
        "weights = tf.keras.callbacks.ModelCheckpoint('w/{epoch}', save_weights_only=True)\n"
        "model.fit(np.ones((8, 2)), np.ones((8, 1)), epochs=2, callbacks=[save, weights])\n"
        "model.save('out')\n"
        "tf.keras.models.save_model(model, os.path.join('a', 'out'))\n"
        "model.save_weights('reg.h5')\n"
        "again = tf.keras.models.load_model('out')\n"
        "again.load_weights('reg.h5')\n"
        "again.load_weights(f'w/2')\n"
        "print(sorted(str(x) for x in pathlib.Path().rglob('*') if x.is_file()))\n"
    )
    ported = port_program(
        source.replace("model.save('out')", "os.makedirs('a')\nmodel.save('out')")
    )
    assert ported.leftovers == ()
    done = subprocess.run(
        [sys.executable, "-c", ported.source],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(
        sorted(
            "a/out.keras ck/1.keras ck/2.keras out.keras reg.weights.h5 w/1.weights.h5 "
            "w/2.weights.h5".split()
        )
    )
