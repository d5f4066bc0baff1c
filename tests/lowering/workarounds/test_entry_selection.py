"""Comparison selects the same entries as an index."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from tpudist.lowering.workarounds import entry_selection
from tpudist.programs import jaxpr_rewrite

TABLE = np.random.default_rng(0).normal(size=(3, 4, 6)).astype(np.float32)
# Some are negative and count from the end, and some are out of range.
INDICES = np.array([[0, 5, -1, 6], [2, 3, -6, -7], [1, 1, 100, 4]], np.int32)


def pick(table, indices, mode=None, axis=-1):
    return jnp.take_along_axis(table, jnp.expand_dims(indices, axis), axis=axis, mode=mode)


def in_other_words(function):
    def call(*args):
        closed = jax.make_jaxpr(function)(*args)
        new = jaxpr_rewrite.rewrite(closed, is_pick, entry_selection.pick)
        assert not any(is_pick(eqn) for eqn in new.eqns)
        assert new is not closed
        (found,) = core.jaxpr_as_fun(new)(*args)
        return found

    return call


def is_pick(eqn):
    return "dimension_numbers" in eqn.params and entry_selection.picks_entries(eqn)


@pytest.mark.parametrize("mode", [None, "fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_same_entries_are_picked(mode, dtype):
    indices = np.clip(INDICES, 0, 5) if mode == "promise_in_bounds" else INDICES
    table = TABLE.astype(dtype)
    function = functools.partial(pick, mode=mode)
    found, wanted = in_other_words(function)(table, indices), function(table, indices)
    assert found.dtype == wanted.dtype
    # NumPy takes no two bfloat16 NaN for equal.
    np.testing.assert_array_equal(found.astype(jnp.float32), wanted.astype(jnp.float32))


def test_entries_along_another_dim_are_picked():
    function = functools.partial(pick, axis=1)
    indices = np.array([[0, 1, 2, 3, 3, 9]] * 3, np.int32)
    np.testing.assert_array_equal(
        in_other_words(function)(TABLE, indices), function(TABLE, indices)
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16])
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_indices_smaller_than_a_row_is_long_do_not_wrap_around(dtype, mode):
    """`jnp` indexes with 32 bits, but `lax.gather` accepts any integers."""
    table = np.arange(2 * 70000, dtype=np.float32).reshape(2, 70000)
    numbers = jax.lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
    function = lambda t, i: jax.lax.gather(t, i, numbers, (1, 1), mode=mode)  # noqa: E731
    indices = np.array([[[5]], [[7]]], dtype)
    np.testing.assert_array_equal(in_other_words(function)(table, indices), [[5], [70007]])


def test_an_entry_that_is_not_changed_keeps_its_sign():
    numbers = jax.lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
    function = lambda *args: jax.lax.scatter_add(*args, numbers)  # noqa: E731
    arguments = -np.zeros((2, 3), np.float32), np.array([[[1]], [[2]]]), np.ones((2, 1), np.float32)
    found, wanted = in_other_words(function)(*arguments), function(*arguments)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


def test_infinite_neighbours_are_not_picked():
    table = np.where(TABLE > 0.5, np.inf, np.where(TABLE < -0.5, np.nan, TABLE))
    np.testing.assert_array_equal(in_other_words(pick)(table, INDICES), pick(table, INDICES))


@pytest.mark.parametrize("mode", [None, "clip"])
def test_the_gradient_is_the_same(mode):
    indices = np.clip(INDICES, -6, 5)  # elsewhere the loss is NaN
    function = jax.grad(lambda t, i: jnp.sin(pick(t, i, mode)).sum())
    np.testing.assert_array_equal(
        in_other_words(function)(TABLE, indices), function(TABLE, indices)
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda t, i: t[0, 0][i],
        lambda t, i: t[i % 3],
        lambda t, i: jnp.take_along_axis(t, jnp.concatenate([i, i], 1).reshape(3, 4, 2), -1),
    ],
    ids=["of one row", "rows", "two of each row"],
)
def test_other_lookups_are_left_alone(function):
    closed = jax.make_jaxpr(function)(TABLE, INDICES)
    assert "gather" in str(closed)
    assert jaxpr_rewrite.rewrite(closed, is_pick, entry_selection.pick) is closed
