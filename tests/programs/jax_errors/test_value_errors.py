"""An error about the value of a traced array names the function, its line and the fix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist

X = jnp.ones(())


def branch(x):
    return x if x > 0 else -x


def repeat(x):
    while x < 3:
        x = x + 1
    return x


def branch_in_a_loop(x):
    return jax.lax.scan(lambda carry, _: (branch(carry), None), x, None, length=1)[0]


def convert(x):
    return float(x)


def read(x):
    return x.item()


def shape(x):
    return jnp.zeros(x.astype(int))


def call_numpy(x):
    return np.sin(x)


def index(x):
    return [1, 2][x.astype(int)]


def count(x):
    return [0 for _ in range(x.astype(int))]


def select(x):
    return x[x > 0]


def show(x):
    return f"{x:.2f}"


# A function, its mistake, and the code to write instead.
CASES = [
    (branch, "as a Python condition", "jax.lax.cond"),
    (repeat, "as a Python condition", "jax.lax.while_loop"),
    (branch_in_a_loop, "as a Python condition", "jnp.where"),
    (convert, "as a Python number", "convert the result of strategy.run"),
    (read, "as a Python number", "convert the result of strategy.run"),
    (shape, "as a Python number", "come from x.shape"),
    (call_numpy, "passes an array to NumPy", "jax.numpy"),
    (index, "as a Python integer", "jnp.take"),
    (count, "as a Python integer", "jax.lax.fori_loop"),
    (select, "selects with a mask", "jnp.where"),
    (show, "formats an array", "jax.debug.print"),
]


@pytest.mark.parametrize(
    ("function", "use", "remedy"), CASES, ids=lambda x: getattr(x, "__name__", "")
)
@pytest.mark.parametrize("axes", [{}, {"fsdp": 2}], ids=str)
def test_the_use_of_a_traced_value_is_explained(function, use, remedy, axes):
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=jax.devices()[:2])
    with pytest.raises((TypeError, IndexError)) as plain:
        jax.jit(function)(X)
    with pytest.raises(type(plain.value)) as raised:
        strategy.run(function, args=(X,))
    text = str(raised.value)
    assert text.startswith(f"'{function.__name__}' (")
    assert "test_value_errors.py:" in text
    assert use in text
    assert remedy in text
    with strategy.debug():  # the fix that works for all of them
        strategy.run(function, args=(X,))


def test_an_error_is_explained_once():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    whole = tpudist.function(lambda x: strategy.run(branch, args=(x,)))
    with strategy.scope(), pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        whole(X)
    assert str(raised.value).count("is traced once for all replicas") == 1


def test_a_python_number_that_is_needed_still_becomes_part_of_the_program():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    assert strategy.run(lambda n: jnp.zeros(n), args=(3,)).shape == (3,)
    assert strategy.run(lambda x, positive: x if positive > 0 else -x, args=(X, 1)) == 1
