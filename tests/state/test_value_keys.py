"""Python values that are part of a program: their contents count, not their identity."""

import argparse
import collections
import dataclasses
import enum
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from compiles import NewCompiles
from tpudist.state import value_keys


@pytest.fixture(scope="module")
def mirrored():
    return tpudist.MirroredStrategy()


@pytest.fixture
def compiles():
    new_compiles = NewCompiles()
    return lambda: [record.cause for record in new_compiles()]


class Plain:
    def __init__(self, lr):
        self.lr = lr


class Slotted:
    __slots__ = ("lr",)

    def __init__(self, lr):
        self.lr = lr


@dataclasses.dataclass
class Mutable:
    lr: float


@dataclasses.dataclass(eq=False)
class ByIdentity:
    lr: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    lr: float


class Nested:
    def __init__(self, lr):
        self.inner = {"optimizer": [Plain(lr)]}
        self.itself = self

    @property
    def lr(self):
        return self.inner["optimizer"][0].lr

    @lr.setter
    def lr(self, value):
        self.inner["optimizer"][0].lr = value


class WithArray:
    def __init__(self, lr):
        self.array = np.array([lr])

    @property
    def lr(self):
        return float(self.array[0])

    @lr.setter
    def lr(self, value):
        self.array[0] = value


_OBJECTS = (
    Plain,
    Slotted,
    Mutable,
    ByIdentity,
    Nested,
    WithArray,
    lambda lr: types.SimpleNamespace(lr=lr),
    lambda lr: argparse.Namespace(lr=lr),
)


@pytest.mark.parametrize("make", _OBJECTS)
def test_an_object_that_was_changed_is_used_as_it_is_now(mirrored, make, compiles):
    """Earlier, the program silently continued with the old value."""

    def step(config, x):
        return x * config.lr

    config = make(0.5)
    for rate in (0.5, 2.0, 0.5):
        config.lr = rate
        assert float(mirrored.run(step, (config, jnp.float32(1)))) == rate
    causes = compiles()
    assert len(causes) == 2
    assert causes[1].startswith("config was a ")


def test_a_compile_names_the_attribute_that_was_changed(mirrored, compiles):
    config = Plain(0.5)

    def step(config, x):
        return x * config.lr

    for rate in (0.5, 2.0):
        config.lr = rate
        mirrored.run(step, (config, jnp.float32(1)))
    assert compiles()[1] == "config was a Plain(lr=0.5), is a Plain(lr=2.0)"


def test_a_set_or_a_list_in_it_that_was_changed_is_used_as_it_is_now(mirrored):
    chosen, holder = {1, 2}, Plain([1])

    def step(chosen, holder, x):
        return x + sum(chosen) + sum(holder.lr)

    assert float(mirrored.run(step, (chosen, holder, jnp.float32(0)))) == 4
    chosen.add(4)
    assert float(mirrored.run(step, (chosen, holder, jnp.float32(0)))) == 8
    holder.lr.append(8)
    assert float(mirrored.run(step, (chosen, holder, jnp.float32(0)))) == 16


class Color(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "make",
    [
        lambda: {3, "x"},
        lambda: frozenset((3, "x")),
        lambda: Mutable(0.5),
        lambda: Frozen(math.nan),
        lambda: types.SimpleNamespace(lr=0.5),
        lambda: types.MappingProxyType({"lr": 0.5}),
        lambda: collections.deque([1, 2]),
        lambda: types.SimpleNamespace(text=bytearray(b"x")),
        lambda: slice(1, 2),
        lambda: range(3),
        lambda: Color.RED,
        lambda: np.dtype("int8"),
        lambda: (np.float32("nan"), jnp.bfloat16.dtype.type(1)),
        lambda: "text",
        lambda: math,
        lambda: math.sin,
        lambda: Plain,
        lambda: jax.devices()[0],
    ],
)
def test_values_that_hold_the_same_are_one_program(mirrored, make, compiles):
    def step(value, x):
        return x + 1

    for _ in range(3):
        mirrored.run(step, (make(), jnp.float32(1)))
    assert len(compiles()) == 1


def test_objects_that_are_looked_at_when_they_are_used_are_known_by_identity(mirrored, compiles):
    with mirrored.scope():
        variable = tpudist.Variable(1.0)
    resolver = tpudist.cluster_resolver.SimpleClusterResolver({"worker": ["a:1"]})
    values = (
        variable,
        mirrored,
        optax.adam(1e-3),
        functools.partial(max, 1),
        resolver,
        nnx.relu,
        lambda x: x,
    )

    def step(x, *values):
        return x + values[0].read_value()

    for value in (1.0, 2.0):
        variable.assign(value)
        assert float(mirrored.run(step, (jnp.float32(1), *values))) == 1 + value
    assert len(compiles()) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [(np.float32(0), np.float32(-0.0)), (np.int8(1), np.int16(1)), (np.str_("1"), "1")],
)
def test_numpy_scalars_are_compared_by_dtype_and_bytes(one, other):
    assert value_keys.key_of((one,)) == value_keys.key_of((one.copy(),))
    assert value_keys.key_of((one,)) != value_keys.key_of((other,))


class Unknown:
    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other):
        return True


def test_what_can_change_and_cannot_be_looked_into_is_refused(mirrored):
    for value, name in (
        (Unknown(), r"type Unknown\."),
        (Plain(Unknown()), r"type Unknown \(in a Plain\)"),
    ):
        with pytest.raises(
            TypeError, match=rf"function received an object of {name}.*frozen dataclass"
        ):
            mirrored.run(lambda value: 1, (value,))


def test_an_object_that_holds_very_much_is_refused(mirrored):
    value = Plain(list(range(value_keys.MAX_VALUES)))
    with pytest.raises(TypeError, match=r"Plain that holds more than 1000 values.*Pass a frozen"):
        mirrored.run(lambda value: 1, (value,))
