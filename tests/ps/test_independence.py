"""Proofs that a transformation treats variables separately."""

import jax.numpy as jnp
import optax
import pytest

from tpudist.ps.independence import prove_independence

PARAMETERS = {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}

ELEMENTWISE = {
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(optax.cosine_decay_schedule(1.0, 10)),
    "adagrad": optax.adagrad(0.1),
    "adamw": optax.adamw(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "lion": optax.lion(0.1),
    "clip of each": optax.chain(optax.clip(1.0), optax.sgd(0.1)),
    "multi-steps": optax.MultiSteps(optax.adam(1e-3), 4),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(1e-3),
}
WHOLE = {
    "adafactor": optax.adafactor(0.1),
    "lamb": optax.lamb(0.1),
    "novograd": optax.novograd(0.1),
    "clip by block": optax.clip_by_block_rms(1.0),
}
MIXED = {
    "clip by global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "apply if finite": optax.apply_if_finite(optax.adam(1e-3), 3),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_transformations_are_independent(name):
    found = prove_independence(ELEMENTWISE[name], PARAMETERS)
    assert (found.mixed, found.whole) == ((), ())


@pytest.mark.parametrize("name", WHOLE)
def test_transformations_of_one_variable_need_all_of_it(name):
    found = prove_independence(WHOLE[name], PARAMETERS)
    assert (found.mixed, found.whole) == ((), ("a", "b"))


@pytest.mark.parametrize("name", MIXED)
def test_transformations_of_all_variables_are_mixed(name):
    assert prove_independence(MIXED[name], PARAMETERS).mixed == ("a", "b")


def test_one_variable_is_never_mixed():
    assert prove_independence(MIXED["clip by global norm"], {"a": jnp.ones(3)}).mixed == ()


def test_updates_at_other_places_need_all_of_the_variable():
    def swap(updates, state, parameters=None):
        return {"a": updates["a"], "b": updates["b"][::-1]}, state

    tx = optax.GradientTransformation(lambda _: optax.EmptyState(), swap)
    assert prove_independence(tx, PARAMETERS).whole == ("b",)
