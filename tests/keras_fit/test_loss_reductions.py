"""Keras losses that average over rows, in replica functions."""

import os

import keras
import numpy as np
import pytest

import tpudist
from keras_loops import Loop, X, Y, batch_of, one


def step_of(loop, loss):
    def step(x, y):
        compute = tpudist.keras.value_and_grad(lambda: loss(y, loop.model(x)), loop.model)
        value, gradients = compute()
        loop.optimizer.apply(gradients, loop.model.trainable_variables)
        return value

    return step


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "mean_with_sample_weight"])
def test_a_mean_over_local_rows_is_rejected_if_gradients_are_summed(reduction):
    loop = Loop(tpudist.MirroredStrategy())
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    before = [np.asarray(x.value) for x in loop.model.variables]
    with pytest.raises(ValueError, match=rf"MeanSquaredError\(reduction='{reduction}'\)") as error:
        loop.strategy.run(step_of(loop, loss), args=batch_of(loop.strategy, X[:56], Y[:56]))
    message = str(error.value)
    assert f"{os.path.basename(__file__)}:" in message
    assert "8 replicas" in message
    assert "tpudist.compute_average_loss(losses)" in message
    for variable, value in zip(loop.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.value, value)


@pytest.mark.slow
def test_sum_reduction_and_a_single_replica_are_unchanged():
    for strategy in (tpudist.MirroredStrategy(), one()):
        loop = Loop(strategy)
        loss = keras.losses.MeanSquaredError(reduction="sum")
        value = strategy.run(step_of(loop, loss), args=batch_of(strategy, X[:56], Y[:56]))
        keras.utils.set_random_seed(0)
        wanted = np.sum(np.square(Loop(one()).model(X[:56]) - Y[:56]))
        np.testing.assert_allclose(strategy.reduce("sum", value, axis=None), wanted, rtol=1e-4)
    loop = Loop(one())
    mean = keras.losses.MeanSquaredError()
    value = loop.strategy.run(step_of(loop, mean), args=(X[:56], Y[:56]))
    np.testing.assert_allclose(value, wanted / 56, rtol=1e-4)


def test_a_loss_that_is_only_measured_may_be_a_mean():
    """Each replica returns its own mean, as in JAX; the program decides how to combine them."""
    loop = Loop(tpudist.MirroredStrategy())
    mean = keras.losses.MeanSquaredError()
    batch = batch_of(loop.strategy, X[:56], Y[:56])
    value = loop.strategy.run(lambda x, y: mean(y, loop.model(x)), args=batch)
    wanted = np.mean(np.square(loop.model(X[:56]) - Y[:56]))
    np.testing.assert_allclose(loop.strategy.reduce("mean", value, axis=None), wanted, rtol=1e-4)
