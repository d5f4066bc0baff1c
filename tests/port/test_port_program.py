"""The port of whole programs: it matches the recorded output, is idempotent, and runs."""

import functools
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tpudist
from places import ROOT
from tpudist.port import CannotPort, port_program
from tpudist.port.guide_sections import (
    ADVICE,
    CAPTURED,
    KERAS_MODULE,
    KERAS_TAPE,
    MODULE_VARIABLE,
    OLD_LEARNING_RATE,
    RANDOM_VALUE,
    RESULT,
    SAVED_FILES,
)

PROGRAMS = Path(__file__).parent / "programs"
NAMES = sorted(path.name.removesuffix("_before.py") for path in PROGRAMS.glob("*_before.py"))
# Number of names to port manually.
LEFT = {"fit": 0, "loop": 0, "statistics": 0, "tape": 2, "tpu": 0}
PRINTED = {
    "fit": ["Number of devices: 8", "Losses fall: True", "Same accuracy: True"],
    # The output of the original program under TensorFlow 2.21.
    "loop": [
        "Epoch 1: loss 94.194, error 7.343, test loss 52.529",
        "Epoch 2: loss 19.025, error 3.270, test loss 12.896",
        "Epoch 3: loss 9.218, error 2.547, test loss 18.925",
    ],
    "statistics": ["Steps: 4", "Total: 9900.0", "Rows: 32", "Sum: 48.0"],
    "tpu": ["Sum of all: 112.0"],
}


def program(name: str, when: str) -> str:
    return (PROGRAMS / f"{name}_{when}.py").read_text()


@functools.cache
def ported_before(name):
    return port_program(program(name, "before"))


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "statistics" else pytest.mark.slow) for x in NAMES]
)
def test_the_port_of_a_program_matches_the_recorded_file(name):
    """To record a file: `tpudist port PROGRAM_before.py --output PROGRAM_after.py`."""
    ported = ported_before(name)
    assert ported.source == program(name, "after")
    assert len(ported.leftovers) == LEFT[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_ported_program_is_not_changed_again(name):
    ported = ported_before(name)
    assert port_program(ported.source) == ported
    compile(ported.source, name, "exec")


# Runs the given programs, and continues after a failure.
RUN_ALL = """
import runpy, sys, traceback
for path in sys.argv[1:]:
    print("Program:", path, flush=True)
    try:
        runpy.run_path(path, run_name="__main__")
        print("Ended.", flush=True)
    except Exception:
        traceback.print_exc()
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Returns the lines that each program has printed, and the stderr of all programs.

    All run in one process, which imports JAX and Keras once.
    """
    has_keras = importlib.util.find_spec("keras") is not None
    paths = {
        str(PROGRAMS / f"{name}_after.py"): name
        for name in sorted(PRINTED)
        if has_keras or name not in ("fit", "loop")
    }
    folder = tmp_path_factory.mktemp("programs")
    (folder / "tensorflow.py").write_text("raise ImportError('TensorFlow must not be imported')\n")
    (folder / "run_all.py").write_text(RUN_ALL)
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "tpudist", "run", "--emulate", "8", folder / "run_all.py", *paths],
        env=environment | {"KERAS_HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    _, *parts = done.stdout.split("Program: ")
    lines = {paths[path]: rest.splitlines() for path, _, rest in (x.partition("\n") for x in parts)}
    return lines, done.stderr


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRINTED))
def test_a_program_without_leftovers_runs_without_tensorflow(name, printed):
    if name in ("fit", "loop") and importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed")
    lines, errors = printed
    assert lines[name][-1] == "Ended.", errors
    assert [line for line in lines[name] if line in PRINTED[name]] == PRINTED[name]


@pytest.mark.slow
def test_leftovers_name_existing_sections():
    ported = ported_before("tape")
    lines = ported.source.splitlines()
    assert all(one.name.rpartition(".")[2] in lines[one.line - 1] for one in ported.leftovers)
    more = (CAPTURED, KERAS_MODULE, KERAS_TAPE, MODULE_VARIABLE, OLD_LEARNING_RATE, RESULT)
    for section in {SAVED_FILES, *(advice.section for advice in (*ADVICE.values(), *more))}:
        page, _, anchor = section.partition("#")
        text = (ROOT / page).read_text()
        headings = [
            line.lstrip("# ").lower().replace(" ", "-").replace(",", "")
            for line in text.splitlines()
            if line.startswith("#")
        ]
        assert not anchor or anchor in headings or f'<a id="{anchor}">' in text, section


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("print 'two'\n", "Line 1 is not valid Python"),
        ("import numpy as np\nprint(np.ones(3))\n", "uses neither tf.distribute nor tpudist"),
        ("import tensorflow as tf\nprint(tf.ones(3))\n", "uses neither tf.distribute nor tpudist"),
        (
            "import tensorflow as tf\ntpudist = 1\ns = tf.distribute.get_strategy()\n",
            "already uses the name tpudist",
        ),
    ],
)
def test_an_unsupported_program_is_rejected(source, message):
    with pytest.raises(CannotPort, match=message):
        port_program(source)


def test_a_module_of_a_program_may_contain_no_strategy():
    source = "import tensorflow as tf\nmodel = tf.keras.Sequential()\n"
    assert "model = keras.Sequential()" in port_program(source, creates_strategy=False).source


def test_tensorflow_modules_that_stay_are_named():
    source = (
        "import tensorflow as tf\n"
        "strategy = tf.distribute.get_strategy()\n"
        "records = tf.data.TFRecordDataset(tf.io.gfile.glob('*.tfrecord'))\n"
        "dataset = records.map(lambda x: tf.abs(x))\n"
    )
    ported = port_program(source)
    assert ported.leftovers == ()
    assert ported.stays == ("tf.data", "tf.io")
    assert "import tensorflow as tf\nimport tpudist\n" in ported.source


@pytest.mark.parametrize(
    ("model", "section"),
    [
        ("tf.keras.Sequential()", "docs/keras_fit.md#loops-of-your-own"),
        ("tf.keras.applications.ResNet50()", "docs/keras_fit.md#loops-of-your-own"),
        ("Own()", "docs/keras_fit.md#loops-of-your-own"),
        ("make_model()", "docs/porting.md#models-and-optimizers-are-arguments"),
    ],
)
def test_a_tape_that_stays_names_the_guide_for_its_model(model, section):
    source = (
        "import tensorflow as tf\n"
        + ("class Own(tf.keras.Model):\n    pass\n" if model == "Own()" else "")
        + "from tensorflow.keras import layers\n"
        "strategy = tf.distribute.get_strategy()\n"
        f"model = {model}\n"
        "optimizer = tf.keras.optimizers.SGD()\n"
        "mean = tf.keras.metrics.Mean()\n"
        "def step(x):\n"
        "    with tf.GradientTape() as tape:\n"
        "        loss = model(x)\n"
        "    optimizer.apply_gradients([])\n"
        "    return mean.result()\n"
        "strategy.run(step, args=(1,))\n"
    )
    found = {one.name: one for one in port_program(source).leftovers}
    assert found["tf.GradientTape"].section == section
    is_of_keras = "keras_fit" in section
    assert ("tpudist.keras" in found["tf.GradientTape"].instruction) == is_of_keras
    # A model that may not be a Keras model is an argument.
    assert ("model" in found) == (not is_of_keras)
    assert found["mean.result"].section == RESULT.section
    assert "optimizer.apply_gradients" not in found


def test_the_advice_for_a_tf_module_agrees_with_the_rest_of_the_port():
    """The port reads variables with `trainable_variables`, which only Keras models have here."""
    source = (
        "import tensorflow as tf\n"
        "strategy = tf.distribute.get_strategy()\n"
        "class Net(tf.Module):\n"
        "    def __init__(self):\n"
        "        self.w = tf.Variable(tf.random.normal([4, 1], seed=1))\n"
        "        self.b = tf.Variable(tf.zeros([1]))\n"
        "net = Net()\n"
        "optimizer = tf.keras.optimizers.SGD()\n"
        "def step(x):\n"
        "    with tf.GradientTape() as tape:\n"
        "        loss = tf.reduce_sum(net.w * x + net.b)\n"
        "    grads = tape.gradient(loss, net.trainable_variables)\n"
        "    optimizer.apply_gradients(zip(grads, net.trainable_variables))\n"
        "strategy.run(step, args=(1,))\n"
    )
    found = [(one.name, one.instruction) for one in port_program(source).leftovers]
    assert found == [
        ("tf.Module", KERAS_MODULE.instruction),
        ("tf.Variable", MODULE_VARIABLE.instruction),
        ("tf.random.normal", RANDOM_VALUE.instruction),
        ("tf.Variable", MODULE_VARIABLE.instruction),
    ]


def test_the_tensorboard_callback_is_named_but_is_not_a_leftover():
    source = (
        "import tensorflow as tf\n"
        "from tensorflow.keras.callbacks import TensorBoard\n"
        "strategy = tf.distribute.get_strategy()\n"
        "callbacks = [TensorBoard('a'), tf.keras.callbacks.TensorBoard('b')]\n"
    )
    ported = port_program(source)
    assert ported.leftovers == ()
    assert ported.stays == ("keras.callbacks.TensorBoard",)


@pytest.mark.slow
def test_marks_of_an_earlier_port_are_removed_with_their_names():
    source = program("tape", "after").replace("tf.debugging.assert_equal(1, 1)\n", "")
    ported = port_program(source)
    assert "tf.debugging" not in ported.source
    assert len(ported.leftovers) == LEFT["tape"] - 1


@pytest.mark.parametrize(
    ("statement", "what", "section"),
    [
        (
            "tf.distribute.Server(spec)",
            "delete it: tpudist.ParameterServerStrategy(num_workers=4, num_servers=2)",
            "docs/parameter_servers.md#start",
        ),
        ("model.fit(x)", "schedule functions", "docs/parameter_servers.md#start"),
        (
            "def f(x):\n    with tf.GradientTape() as tape: pass\nstrategy.run(f)",
            "jax.value_and_grad(loss)(weights.read_value())",
            "docs/parameter_servers.md#start",
        ),
        (
            "optimizer = make()\ndef f(x):\n    optimizer.apply_gradients([])\nstrategy.run(f)",
            "tpudist.Variable and tpudist.Optimizer",
            "docs/parameter_servers.md#start",
        ),
    ],
)
def test_hints_for_parameter_servers_match_the_guide(statement, what, section):
    """The guide computes gradients of Variable values, and captures the optimizer."""
    source = (
        "import tensorflow as tf\nfrom tensorflow import keras\n"
        "strategy = tf.distribute.ParameterServerStrategy(resolver)\n"
        f"model = keras.Sequential()\n{statement}\n"
    )
    [left] = port_program(source).leftovers
    assert what in left.instruction
    assert left.section == section
    guide = (ROOT / "docs" / "parameter_servers.md").read_text()
    for code in (
        "tpudist.ParameterServerStrategy(num_workers=4, num_servers=2)",
        "weights.read_value()",
        "tpudist.Optimizer(",
    ):
        assert code in guide


def test_the_hint_for_a_checkpoint_is_runnable_code(tmp_path):
    strategy = "import tensorflow as tf\ns = tf.distribute.get_strategy()\n"
    [left] = port_program(f"{strategy}c = tf.train.Checkpoint(m)\n").leftovers
    names = {"tpudist": tpudist, "model": {"w": np.ones(3)}, "optimizer": {"m": np.zeros(3)}}
    code = left.instruction.removeprefix("name its objects: ")
    checkpoint = eval(code, names)
    path = checkpoint.save(tmp_path / "a")
    names["model"] = {"w": np.zeros(3)}
    again = eval(code, names)
    again.restore(path).assert_consumed()
    assert again.model["w"].tolist() == [1, 1, 1]


def test_a_port_reports_its_passes():
    passes = []
    port_program(
        "import tensorflow as tf\ns = tf.distribute.get_strategy()\n",
        on_pass=lambda number, total: passes.append((number, total)),
    )
    assert passes == [(i + 1, len(passes)) for i in range(len(passes))]


@pytest.mark.slow
def test_a_program_of_500_lines_takes_less_than_5_s_of_cpu():
    line = (
        "    x = tf.reduce_mean(tf.cast(x, tf.float32) * {})\n    y = compute(x, {})\n    show(y)\n"
    )
    step = "".join(line.format(i, i) for i in range(165))
    source = (
        "import tensorflow as tf\nstrategy = tf.distribute.get_strategy()\n"
        f"def step(x):\n{step}    return x\nstrategy.run(step, args=(1,))\n"
    )
    start = time.process_time()
    ported = port_program(source)
    assert time.process_time() - start < 5
    assert ported.leftovers == ()
