"""The port rewrites gradient tapes as functions if the result is certain to be the same."""

import pytest

from tpudist.port import port_program

BEFORE = """
import tensorflow as tf

strategy = tf.distribute.{strategy}()
with strategy.scope():
    model = {model}
    optimizer = tf.keras.optimizers.{optimizer}()


def step(x, y):
{step}

strategy.run(step, args=(1, 2))
"""
KERAS = "tf.keras.Sequential([tf.keras.layers.Dense(1)])"


def port(step, *, model=KERAS, optimizer="SGD", strategy="MirroredStrategy"):
    lines = "".join(f"    {line}\n" if line else "\n" for line in step.splitlines())
    source = BEFORE.format(model=model, optimizer=optimizer, strategy=strategy, step=lines)
    ported = port_program(source)
    assert port_program(ported.source) == ported
    compile(ported.source, "program", "exec")
    return ported


def body(ported):
    """Returns the function without its first line."""
    source = ported.source
    start = source.index("def step(x, y):\n") + len("def step(x, y):\n")
    lines = source[start : source.index("strategy.run(")].strip("\n").splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines)


TAPE = """with tf.GradientTape() as tape:
    predictions = model(x)
    loss = (predictions - y) ** 2
"""
ASK = "gradients = tape.gradient(loss, model.trainable_variables)\n"


def test_a_tape_with_only_a_loss_becomes_a_function():
    ported = port(
        "# The loss.\n"
        "with tf.GradientTape() as tape:\n"
        "    loss = model(x)\n"
        "# Its gradients.\n"
        f"{ASK}"
        "optimizer.apply_gradients(zip(gradients, model.trainable_variables))\n"
        "return loss"
    )
    assert ported.leftovers == ()
    assert body(ported) == (
        "# The loss.\n"
        "def loss_of_batch():\n"
        "    loss = model(x)\n"
        "    return loss\n"
        "# Its gradients.\n"
        "loss, gradients = tpudist.keras.value_and_grad(loss_of_batch, model)()\n"
        "optimizer.apply_gradients(zip(gradients, model.trainable_variables))\n"
        "return loss"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "result", "target"),
    [
        ("return predictions", "loss, predictions", "(loss, predictions), gradients"),
        (
            "return predictions, half",
            "loss, (predictions, half)",
            "(loss, (predictions, half)), gradients",
        ),
        (
            "return (lambda: predictions)()",
            "loss, predictions",
            "(loss, predictions), gradients",
        ),
    ],
)
def test_values_read_after_the_tape_are_returned(after, result, target):
    ported = port(TAPE + "    half = loss / 2\n\n" + ASK + after)
    assert f"    return {result}\n" in body(ported)
    assert f"{target} = tpudist.keras.value_and_grad(" in body(ported)
    assert "loss_of_batch, model, has_aux=True)()" in body(ported)


def test_names_in_use_are_not_changed():
    ported = port("loss_of_batch = 3\n" + TAPE + ASK + "return loss_of_batch")
    assert "def loss_of_batch_2():" in body(ported)


def test_gradients_by_the_variables_of_another_model():
    """They are Keras variables, as Keras optimizers need; the model may be of any kind."""
    step = TAPE + ASK + "optimizer.apply_gradients(zip(gradients, model.trainable_variables))"
    ported = port(step, model="build()")
    assert "value_and_grad(loss_of_batch, lambda: model.trainable_variables)()" in body(ported)
    assert ported.leftovers == ()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "step",
    [
        TAPE.replace("()", "(persistent=True)") + ASK,
        TAPE + ASK + ASK.replace("gradients", "again"),
        TAPE + ASK + "tape.watched_variables()",
        TAPE + "x = 3\n" + ASK,
        TAPE + ASK.replace("loss", "loss * 2"),
        TAPE + ASK.replace("loss", "x"),
        TAPE + ASK.replace("model.trainable_variables", "[x]"),
        TAPE + ASK.replace("loss, ", "target=loss, sources="),
        TAPE + "    return loss\n" + ASK,
        "predictions = 0\n" + TAPE + ASK + "return predictions",
        TAPE.replace("predictions", "y") + ASK,
        TAPE + "    if x:\n        half = loss / 2\n" + ASK + "if x:\n    print(half)",
        TAPE.replace("(x)", "((half := x))") + ASK + "return half",
        "for _ in range(3):\n    " + TAPE.replace("\n", "\n    ") + ASK + "    y = predictions",
        "with tf.GradientTape() as outer:\n    "
        + TAPE.replace("\n", "\n    ")
        + ASK
        + "second = outer.gradient(gradients, model.trainable_variables)",
    ],
    ids=[
        "persistent",
        "requested twice",
        "uses the tape again",
        "requested later",
        "of an expression",
        "of something else",
        "by a list",
        "by keywords",
        "returns",
        "binds a name again",
        "binds an argument",
        "binds in a branch",
        "binds in an expression",
        "in a loop",
        "in another tape",
    ],
)
def test_an_uncertain_tape_is_unchanged_and_listed(step):
    ported = port(step)
    assert "tf.GradientTape(" in body(ported)
    assert "tf.GradientTape" in [one.name for one in ported.leftovers]


@pytest.mark.parametrize(
    "options",
    [
        {"model": "build()"},
        {"strategy": "experimental.ParameterServerStrategy"},
        {"strategy": "experimental.CentralStorageStrategy"},
    ],
)
def test_only_tapes_that_keras_trains_under_this_strategy_are_rewritten(options):
    ported = port(TAPE + ASK, **options)
    assert "tf.GradientTape(" in body(ported)


def test_a_tape_outside_replica_functions_is_unchanged():
    source = BEFORE.format(
        model=KERAS, optimizer="SGD", strategy="MirroredStrategy", step="    pass"
    )
    ported = port_program(source + "\nx = y = 1\n" + TAPE + ASK)
    assert ported.source.count("tf.GradientTape(") == 1
