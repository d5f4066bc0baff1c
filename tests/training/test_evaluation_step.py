"""`make_evaluation_step` sums over examples and rejects values that have no row per example."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpudist
from tpudist.training import evaluate, make_evaluation_step

CLASSES = 3
X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
LABELS = (np.arange(12) % CLASSES).astype(np.int32)


@pytest.fixture(scope="module")
def strategy():
    return tpudist.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def model(strategy):
    return strategy.create(lambda: nnx.Linear(2, CLASSES, rngs=nnx.Rngs(0)))


def batches(strategy, rows=12, batch=6):
    """Returns batches in which a replica has as many rows as there are classes."""
    data = {"x": X[:rows], "label": LABELS[:rows]}
    dataset = strategy.experimental_make_numpy_dataset(data).batch(batch)
    return strategy.experimental_distribute_dataset(dataset)


def logits(model, batch):
    return model(batch["x"])


def correct(model, batch):
    return (logits(model, batch).argmax(-1) == batch["label"]).astype(jnp.float32)


def per_class(model, batch):
    return jax.nn.one_hot(batch["label"], CLASSES) * correct(model, batch)[:, None]


NOT_ROWS = {
    "a vector over classes": lambda m, b: {"hits": per_class(m, b).sum(0)},
    "a scalar": lambda m, b: {"hits": correct(m, b).mean()},
    "a Python number": lambda m, b: {"hits": 1.0},
    "examples in dim 1": lambda m, b: {"hits": per_class(m, b).T},
    "all dims in one": lambda m, b: {"hits": per_class(m, b).ravel()},
    "of the model": lambda m, b: {"hits": m.bias[...]},
}


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "debug"])
@pytest.mark.parametrize("kind", list(NOT_ROWS))
def test_a_value_without_a_row_per_example_raises_an_error_that_names_it(
    strategy, model, kind, eager
):
    """Regression: a vector with one value per class was summed over the classes."""
    judge = make_evaluation_step(NOT_ROWS[kind])
    with strategy.debug() if eager else contextlib.nullcontext():
        with pytest.raises(
            ValueError, match=r"returned \['hits'\] of .* dim 0 must be the examples"
        ):
            evaluate(strategy, judge, model, batches(strategy))


@pytest.mark.parametrize("rows", [12, 9, 7])
def test_a_vector_per_example_is_averaged_as_the_error_suggests(strategy, model, rows):
    judge = make_evaluation_step(lambda m, b: {"all": correct(m, b), "classes": per_class(m, b)})
    found = evaluate(strategy, judge, model, batches(strategy, rows))
    alone = {"x": jnp.asarray(X[:rows]), "label": jnp.asarray(LABELS[:rows])}
    np.testing.assert_allclose(found["all"], correct(model, alone).mean(), rtol=1e-6)
    np.testing.assert_allclose(found["classes"], per_class(model, alone).mean(0), rtol=1e-6)


def test_a_model_that_draws_random_numbers_is_evaluated(strategy):
    """The second trace changes a copy of the model."""

    class Net(nnx.Module):
        def __init__(self):
            self.drop = nnx.Dropout(0.5, deterministic=False, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(1))

    model = strategy.create(Net)
    judge = make_evaluation_step(lambda m, b: m.drop(m.norm(b["x"])).sum(1) * 0 + 1)
    assert float(evaluate(strategy, judge, model, batches(strategy))) == 1
    assert int(model.drop.rngs.count[...]) == 2
