"""`value_and_grad` with respect to Keras variables, in replica functions."""

import jax
import keras
import numpy as np
import pytest

import tpudist
from keras_loops import Loop, X, Y, batch_of
from tpudist.keras import value_and_grad


@pytest.fixture
def loop():
    return Loop(tpudist.MirroredStrategy())


def gradients_of(loop, variables, **options):
    def step(x, y):
        compute = value_and_grad(lambda x: (loop.model(x) ** 2).sum(), variables, **options)
        return compute(x)

    return loop.strategy.run(step, args=batch_of(loop.strategy, X[:56], Y[:56]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "choose",
    [
        lambda model: model,
        lambda model: model.trainable_variables,
        lambda model: lambda: model.trainable_variables,
        lambda model: model.layers[-1],
        lambda model: model.layers[0].kernel,
    ],
    ids=["model", "list", "function", "layer", "variable"],
)
def test_value_and_grad_matches_jax(loop, choose):
    chosen = choose(loop.model)
    value, gradients = gradients_of(loop, chosen)
    weights = loop.model.trainable_variables
    given = [x.value for x in weights]

    def compute(values):
        return (loop.model.stateless_call(values, [], X[:56])[0] ** 2).sum()

    wanted, by_all = jax.value_and_grad(compute)(given)
    value = loop.strategy.reduce("sum", value, axis=None)
    np.testing.assert_allclose(value, wanted, rtol=1e-4)
    if isinstance(chosen, keras.Variable):
        chosen = [chosen]
    by_it = chosen.trainable_variables if isinstance(chosen, keras.Layer) else chosen
    by_it = by_it() if callable(by_it) else by_it
    of = {id(v): g for v, g in zip(weights, by_all, strict=True)}
    assert len(gradients) == len(by_it)
    for found, weight in zip(gradients, by_it, strict=True):
        found = loop.strategy.reduce("sum", found, axis=None)
        np.testing.assert_allclose(found, of[id(weight)], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_gradients_can_be_nested_and_are_cast_by_the_dtype_policy():
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        loop = Loop(tpudist.MirroredStrategy())
    finally:
        keras.mixed_precision.set_dtype_policy(before)
    dtypes = []

    def step(x, y):
        def penalty():
            _, inner = value_and_grad(lambda: loop.model(x).sum(), loop.model)()
            dtypes.extend(g.dtype for g in inner)
            return sum((g**2).sum() for g in inner)

        return value_and_grad(penalty, loop.model)()[1][0]

    found = loop.strategy.run(step, args=batch_of(loop.strategy, X[:56], Y[:56]))
    assert {str(x) for x in dtypes} == {"float32"}
    assert all(np.abs(x).max() > 0 for x in loop.strategy.experimental_local_results(found))


@pytest.mark.slow
def test_a_stateless_call_uses_the_passed_values(loop):
    zeros = [np.zeros(x.shape, np.float32) for x in loop.model.trainable_variables]

    def step(x, y):
        def compute():
            return loop.model.stateless_call(zeros, [], x)[0].sum() + loop.model(x).sum()

        return value_and_grad(compute, loop.model)()

    value, gradients = loop.strategy.run(step, args=batch_of(loop.strategy, X[:56], Y[:56]))
    value = loop.strategy.reduce("sum", value, axis=None)
    np.testing.assert_allclose(value, np.sum(loop.model(X[:56])), rtol=1e-4)
    np.testing.assert_allclose(loop.strategy.reduce("sum", gradients[-1], axis=None), [56.0])


def test_value_and_grad_outside_replica_functions_raises_an_error(loop):
    with pytest.raises(RuntimeError, match="outside of replica functions"):
        value_and_grad(lambda: loop.model(X).sum(), loop.model)()


@pytest.mark.parametrize(
    ("variables", "kind", "match"),
    [
        ([], ValueError, "received no variables"),
        (lambda: [], ValueError, "Pass the model itself"),
        ([np.zeros(3)], TypeError, "received ndarray to differentiate by"),
        (3, TypeError, "received int to differentiate by"),
    ],
)
def test_value_and_grad_rejects_arguments_that_are_not_variables(loop, variables, kind, match):
    with pytest.raises(kind, match=match):
        gradients_of(loop, variables)


def test_assigning_a_differentiated_variable_raises_an_error(loop):
    def step(x, y):
        def change():
            loop.model.layers[0].bias.assign_add(np.ones(8, np.float32))
            return loop.model(x).sum()

        return value_and_grad(change, loop.model)()

    with pytest.raises(RuntimeError, match="tpudist.keras.value_and_grad differentiates by it"):
        loop.strategy.run(step, args=batch_of(loop.strategy, X[:56], Y[:56]))
