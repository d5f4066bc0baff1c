"""Python numbers as arguments: traced as in `jax.jit`, or static if the function needs them."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpudist
from compiles import NewCompiles
from tpudist.run import recent_steps


@pytest.fixture
def mirrored():
    return tpudist.MirroredStrategy()


@pytest.fixture
def compiles():
    return NewCompiles()


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.DEBUG, logger="tpudist.compile")
    return lambda: [r.message for r in caplog.records if "Python number" in r.message]


@pytest.mark.slow
def test_a_thousand_learning_rates_share_one_program(mirrored, compiles):
    """Each number once cost one compilation, and 1.6 MB that were never freed."""

    def step(x, lr):
        return (x * lr).sum()

    x = jnp.ones(4)
    rates = [0.001 * i for i in range(1000)]
    got = [mirrored.run(step, (x, rate)) for rate in rates]
    np.testing.assert_allclose([float(y) for y in got], np.multiply(4, rates), rtol=1e-6)
    assert [r.cause for r in compiles()] == ["first call"]


@pytest.mark.parametrize("number", [True, 2, 0.5, 2j])
def test_a_number_has_a_weak_type_as_in_jit(mirrored, number):
    for dtype in (jnp.bfloat16, jnp.int8, jnp.complex64):
        x = jnp.ones(2, dtype)
        ours = mirrored.run(lambda x, n: x * n, (x, number))
        theirs = jax.jit(lambda x, n: x * n)(x, number)
        assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())


@pytest.mark.parametrize("number", [True, 2, 0.5, 2j, 2**40])
def test_a_number_that_is_returned_is_the_same_number(mirrored, number):
    [same] = mirrored.run(lambda n: [n], (number,))
    assert type(same) is type(number)
    assert same == number


_NEEDS = {
    "range": (lambda x, n: sum((x for _ in range(n)), x), 3),
    "a shape": (lambda x, n: x.reshape(n, -1)[0], 2),
    "an axis": (lambda x, n: jnp.sum(jnp.stack([x, x]), axis=n), 1),
    "an index of a list": (lambda x, n: [x, 2 * x][n], 1),
    "a key of a dict": (lambda x, n: {1: x, 2: 2 * x}[n], 2),
    "if": (lambda x, n: x if n else -x, 1),
    "arithmetic before it": (lambda x, n: jnp.zeros(2 * n + 1), 2),
    "Python's own function": (lambda x, n: x * float(n), 1.5),
    "NumPy": (lambda x, n: x * np.sqrt(n), 4.0),
    "a slice": (lambda x, n: x[:n], 2),
    "a gradient through a loop": (
        lambda x, n: jax.grad(lambda x: jax.lax.fori_loop(0, n, lambda _, y: y * x, x).sum())(x),
        3,
    ),
}


@pytest.mark.parametrize("use", _NEEDS)
def test_a_function_that_needs_a_python_number_gets_it(mirrored, use, told, compiles):
    function, number = _NEEDS[use]
    x = jnp.arange(4.0)

    def step(x, n):
        return function(x, n)

    for _ in range(2):
        got = mirrored.run(step, (x,), {"n": number})
        np.testing.assert_allclose(got, jax.jit(function, static_argnums=1)(x, number))
    assert len(compiles()) == 1
    [message] = told()
    assert message.startswith("step needs n as a Python number")


def test_a_number_after_a_star_has_a_name_of_its_own(mirrored, told):
    def step(x, *numbers, size):
        return x + numbers[1] * jnp.ones(size)

    assert mirrored.run(step, (1.0, 2.0, 3.0), {"size": 2}).tolist() == [4, 4]
    [message] = told()
    assert message.startswith("step needs size as a Python number")
    assert mirrored.run(step, (1.0, 2.0, 5.0), {"size": 2}).tolist() == [6, 6]
    [record] = [x for x in tpudist.compile_log() if x.function == "step"][-1:]
    assert record.cause == "first call"


def test_only_the_number_that_is_needed_becomes_static(mirrored, told, compiles):
    def step(x, hyper, num_steps):
        for _ in range(num_steps):
            x = x * hyper["decay"] + hyper["shift"]
        return x

    for shift in (1, 2, 3):
        got = mirrored.run(step, (jnp.float32(1), {"decay": 0.5, "shift": shift}, 2))
        assert float(got) == 0.25 + 1.5 * shift
    assert [r.cause for r in compiles()] == ["first call"]
    [message] = told()
    assert "needs num_steps as" in message


def test_a_number_may_be_needed_for_one_shape_only(mirrored):
    def step(x, n):
        return x * n if x.ndim == 1 else jnp.full(n, x)

    for x, n, expected in [(jnp.ones(2), 3, [3, 3]), (jnp.float32(2), 2, [2, 2])] * 2:
        assert mirrored.run(step, (x, n)).tolist() == expected


def test_a_function_that_always_fails_raises_its_own_error(mirrored, compiles):
    def step(x, n):
        raise KeyError(f"no {type(n).__name__}")

    for _ in range(2):
        with pytest.raises(KeyError, match="no int"):
            mirrored.run(step, (jnp.ones(2), 3))


def test_static_argnums_keep_python_numbers(mirrored, compiles, told):
    options = tpudist.RunOptions(static_argnums=1)
    assert options.static_argnums == (1,)
    seen = []

    def step(x, lr):
        seen.append(lr)
        return x * lr

    for rate in (0.5, 2.0, 0.5):
        assert float(mirrored.run(step, (jnp.float32(1), rate), options=options)) == rate
    assert set(seen) == {0.5, 2.0}
    assert [r.cause for r in compiles()] == ["first call", "lr was the value 0.5, is the value 2.0"]
    assert told() == []


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Flags:
    training: bool
    rate: float


_PLACES_OF_A_BOOL = {
    "an argument": (lambda b: b, lambda o: o),
    "a dict": (lambda b: {"training": b, "rate": 0.5}, lambda o: o["training"]),
    "nested containers": (lambda b: [(), {"of": (1.0, b)}], lambda o: o[1]["of"][1]),
    "a dataclass": (lambda b: _Flags(b, 0.5), lambda o: o.training),
}


@pytest.mark.parametrize("place", _PLACES_OF_A_BOOL)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_boolean_is_static_as_in_tensorflow(mirrored, place, by_keyword, compiles):
    """`training is True` was silently false, because the function received an array."""
    wrap, unwrap = _PLACES_OF_A_BOOL[place]

    def step(x, o):
        return x * 100 if unwrap(o) is True else x * 10 if unwrap(o) is False else x

    x = jnp.float32(3)
    # The array comes in between, because its position is not inspected closely afterwards.
    for flag, expected in [(True, 300), (jnp.asarray(True), 3), (True, 300), (False, 30)] * 2:
        o = wrap(flag)
        got = mirrored.run(step, (x,), {"o": o}) if by_keyword else mirrored.run(step, (x, o))
        assert float(got) == expected
    assert len(compiles()) == 3


def test_a_boolean_is_static_in_a_partial_batch_and_in_a_function(mirrored):
    rows = mirrored.experimental_make_numpy_dataset(np.arange(3, dtype=np.float32)).batch(4)

    @tpudist.function
    def step(batch, training):
        assert type(training) is bool
        return mirrored.run(lambda b, t: b * 100 if t is True else b, (batch, training))

    for batch in mirrored.experimental_distribute_dataset(rows):
        assert mirrored.gather(step(batch, True), axis=0).tolist() == [0, 100, 200]


@pytest.mark.parametrize("field", ["static_argnums", "donate_argnums"])
def test_positions_of_arguments_must_be_existing_integers(mirrored, field):
    for wrong in ("x", (0.5,), None, (True,)):
        with pytest.raises(TypeError, match=rf"RunOptions\({field}=.*must hold positions"):
            tpudist.RunOptions(**{field: wrong})
    options = tpudist.RunOptions(**{field: (2,)})
    with pytest.raises(ValueError, match=rf"{field}=\(2,\).*received 1 positional"):
        mirrored.run(lambda x: x + 1, (jnp.ones(2),), options=options)


def test_an_integer_that_does_not_fit_stays_a_python_number(mirrored):
    def step(key):
        return jax.random.key_data(jax.random.key(key))

    for seed in (3, 2**40, 2**31 - 1, -(2**31), 2**31):
        expected = jax.random.key_data(jax.random.key(seed))
        assert mirrored.run(step, (seed,)).tolist() == expected.tolist()
    with pytest.raises(OverflowError):
        mirrored.run(lambda x, n: x + n, (jnp.int32(1), 2**40))


def test_several_steps_in_one_program_receive_numbers(mirrored, compiles):
    def step(n, lr, x):
        return jnp.zeros(n) + lr * x

    for lr in (0.5, 1.5):
        got = mirrored.run_steps(step, iter([jnp.float32(1), jnp.float32(2)]), 2, (3, lr))
        assert [y.tolist() for y in got] == [[lr] * 3, [2 * lr] * 3]
    assert len(compiles()) == 1


def test_a_function_around_run_receives_numbers(mirrored, compiles):
    @tpudist.function
    def outer(x, lr, num_steps):
        for _ in range(num_steps):
            x = mirrored.run(lambda x, lr: x * lr, (x, lr))
        return x

    for lr in (0.5, 3.0):
        assert float(outer(jnp.float32(1), lr, 2)) == lr**2
    assert len(compiles()) == 1


def test_a_program_with_numbers_is_lowered(mirrored):
    lowered = mirrored.lower(lambda x, lr, n: jnp.zeros(n) + x * lr, (jnp.float32(1), 0.5, 2))
    assert "0.5" not in lowered.as_text().replace("0.000000e+00", "")


def test_programs_that_are_no_longer_called_are_dropped(mirrored, caplog, monkeypatch, compiles):
    """Each new string used to create a program that was never dropped."""
    monkeypatch.setattr(recent_steps, "MAX_STEPS", 3)

    def step(x, name):
        return x + len(name)

    function = mirrored._replicator.function_of(step)
    names = ["", "a", "bb", "ccc", "dddd", "eeeee"]
    with caplog.at_level("WARNING", logger="tpudist.compile"):
        for name in names:
            assert float(mirrored.run(step, (jnp.float32(1), name))) == 1 + len(name)
            mirrored.run(step, (jnp.float32(1), ""))
    assert len(function.recent) == 3
    assert [len(form.steps) for form in function.forms.values()] == [3]
    [form] = function.forms.values()
    assert len(form.latest) == 3
    told = [r.message for r in caplog.records if "compiled programs" in r.message]
    assert len(told) == 1
    assert told[0].startswith("step has more than 3 compiled programs")
    assert len(compiles()) == len(names)  # the first one is called all the time
    mirrored.run(step, (jnp.float32(1), "a"))
    assert len(compiles()) == 1
