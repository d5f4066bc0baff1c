"""RowOptimizer: Optax on each row separately."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpudist.ps.tables.row_optimizers import RowOptimizer, Rows
from tpudist.ps.tables.rowwise_adagrad import rowwise_adagrad

NUM_ROWS, DIM = 12, 4

ELEMENTWISE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adagrad": optax.adagrad(0.1),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "schedule": optax.sgd(optax.linear_schedule(0.1, 0.01, 3)),
}


def table_of(optimizer, values):
    return Rows(values, jax.vmap(optimizer.init)(values))


def random_rows(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_rows_that_always_have_gradients_match_optax(name):
    optimizer = RowOptimizer(ELEMENTWISE[name])
    values, touched = random_rows(NUM_ROWS, DIM), jnp.array([7, 0, 3])
    table, dense = table_of(optimizer, values), values[touched]
    state = ELEMENTWISE[name].init(dense)
    update = jax.jit(optimizer.update)
    for step in range(3):
        gradients = random_rows(3, DIM) * (step + 1)
        table = update(table, touched, gradients)
        updates, state = ELEMENTWISE[name].update(gradients, state, dense)
        dense = optax.apply_updates(dense, updates)
    np.testing.assert_allclose(table.values[touched], dense, rtol=2e-6, atol=1e-6)
    others = np.setdiff1d(np.arange(NUM_ROWS), touched)
    np.testing.assert_array_equal(table.values[others], values[others])
    for left, first in zip(
        jax.tree.leaves(table.slots),
        jax.tree.leaves(table_of(optimizer, values).slots),
        strict=True,
    ):
        np.testing.assert_array_equal(left[others], first[others])


@pytest.mark.slow
def test_bias_correction_counts_the_updates_of_a_row():
    """The first step of Adam has the size `learning_rate`, however late it comes."""
    optimizer = RowOptimizer(optax.adam(0.1))
    table = table_of(optimizer, jnp.zeros((2, DIM)))
    for _ in range(5):
        table = optimizer.update(table, jnp.array([0]), jnp.ones((1, DIM)))
    table = optimizer.update(table, jnp.array([1]), jnp.full((1, DIM), 7.0))
    np.testing.assert_allclose(table.values[1], np.full(DIM, -0.1), rtol=1e-5)


@pytest.mark.slow
def test_global_norm_clipping_uses_the_norm_of_a_row():
    optimizer = RowOptimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    table = table_of(optimizer, jnp.zeros((2, DIM)))
    gradients = jnp.array([[3.0, 4.0, 0.0, 0.0], [0.3, 0.4, 0.0, 0.0]])
    table = optimizer.update(table, jnp.arange(2), gradients)
    expected = -np.array([[0.6, 0.8, 0, 0], [0.3, 0.4, 0, 0]])
    np.testing.assert_allclose(table.values, expected, rtol=1e-6)


@pytest.mark.slow
def test_rowwise_adagrad_has_one_accumulator_per_row():
    optimizer = RowOptimizer(rowwise_adagrad(0.1, initial_accumulator_value=0.5, eps=0.0))
    values, gradients = random_rows(NUM_ROWS, DIM), random_rows(2, DIM)
    table = table_of(optimizer, values)
    assert [x.shape for x in jax.tree.leaves(table.slots)] == [(NUM_ROWS,)]
    expected, total = np.array(values), np.full(NUM_ROWS, 0.5, np.float32)
    rows = np.array([5, 2])
    for _ in range(3):
        table = optimizer.update(table, jnp.asarray(rows), gradients)
        total[rows] += np.square(gradients).mean(1)
        expected[rows] -= 0.1 * gradients / np.sqrt(total[rows])[:, None]
    np.testing.assert_allclose(table.values, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.tree.leaves(table.slots)[0], total, rtol=1e-6)
    still = RowOptimizer(rowwise_adagrad(0.1, initial_accumulator_value=0.0))
    table = still.update(table_of(still, values), jnp.array([0]), jnp.zeros((1, DIM)))
    np.testing.assert_array_equal(table.values, values)


def test_rows_beyond_the_end_have_no_effect():
    optimizer = RowOptimizer(optax.adam(0.1))
    table = table_of(optimizer, random_rows(NUM_ROWS, DIM))
    past = jnp.array([NUM_ROWS, NUM_ROWS + 1])
    jax.tree.map(
        np.testing.assert_array_equal,
        optimizer.update(table, past, jnp.ones((2, DIM))),
        table,
    )


@pytest.mark.slow
def test_bfloat16_rows_are_computed_in_float32_and_rounded_once():
    optimizer = RowOptimizer(optax.adam(0.1))
    values = random_rows(NUM_ROWS, DIM).astype(jnp.bfloat16)
    rows, gradients = jnp.arange(NUM_ROWS), random_rows(NUM_ROWS, DIM)
    table = optimizer.update(table_of(optimizer, values), rows, gradients)
    exact = table_of(optimizer, values.astype(jnp.float32))
    exact = optimizer.update(exact, rows, gradients)
    np.testing.assert_array_equal(table.values, exact.values.astype(jnp.bfloat16))
    jax.tree.map(np.testing.assert_array_equal, table.slots, exact.slots)


def test_transformations_that_rows_cannot_use_raise_errors():
    with pytest.raises(ValueError, match="The optimizer of a table draws random numbers"):
        RowOptimizer(optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)))
    with pytest.raises(TypeError, match="The optimizer of a table is 0.1 of type float"):
        RowOptimizer(0.1)
    assert RowOptimizer(optax.identity()) != RowOptimizer(optax.sgd(0.1))
