"""Folding all keys of a replica at once gives the same bits as folding each key separately."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpudist
from tpudist.lowering import replica_keys
from tpudist.programs import jaxprs

NUM_LAYERS = 4


class Noisy(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(NUM_LAYERS)])

    def __call__(self, x):
        return jnp.stack([layer(x) for layer in self.layers])


def run():
    """Returns the results of two steps, and the keys after them."""
    strategy = tpudist.MirroredStrategy()
    model = strategy.create(Noisy)

    def step(model, x):
        return model(x)

    results = [strategy.run(step, args=(model, jnp.ones((3, 5)))) for _ in range(2)]
    state = [x.get_raw_value() for x in jax.tree.leaves(nnx.state(model), is_leaf=is_variable)]
    keys = [jax.random.key_data(x) for x in state if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return [x.array for x in results], keys


def is_variable(x):
    return isinstance(x, nnx.Variable)


def test_the_bits_are_the_same_as_with_separate_folds(monkeypatch):
    results, keys = run()
    monkeypatch.setattr(replica_keys, "_take_folds", lambda closed: (closed, []))
    expected, expected_keys = run()
    np.testing.assert_array_equal(results, expected)
    np.testing.assert_array_equal(keys, expected_keys)
    assert len({x.tobytes() for x in np.asarray(results[0])}) > 1  # replicas differ


@pytest.mark.parametrize("depth", [2, 6])
def test_the_compiled_program_folds_once(depth):
    def program(keys):
        index = jax.lax.axis_index("replica")
        return [jax.random.key_data(jax.random.fold_in(x, index)) for x in keys]

    keys = list(jax.random.split(jax.random.key(0), depth))
    traced = jax.make_jaxpr(program, axis_env=[("replica", 8)])(keys)
    function = replica_keys.evaluate(traced)
    again = jax.make_jaxpr(function, axis_env=[("replica", 8)])(*keys)
    names = [eqn.primitive.name for eqn in jaxprs.walk(again)]
    assert names.count("random_fold_in") == 1


def test_only_the_replica_number_of_input_keys_is_folded_at_once():
    def program(key, other, keys, number):
        index = jax.lax.axis_index("replica")
        own = [jax.random.fold_in(x, index) for x in (key, other)]
        more = jax.random.fold_in(own[0], index)  # not of an input
        fixed = jax.random.fold_in(key, 3)
        by_number = jax.random.fold_in(key, number)
        return own, more, fixed, by_number, keys

    key = jax.random.key(0)
    args = (key, key, jax.random.split(key, 2), jnp.uint32(2))
    traced = jax.make_jaxpr(program, axis_env=[("replica", 8)])(*args)
    rest, positions = replica_keys._take_folds(traced)
    assert positions == [0, 1]
    names = [eqn.primitive.name for eqn in jaxprs.open_jaxpr(rest).eqns]
    assert names.count("random_fold_in") == 3


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_other_generators_are_folded_separately(impl):
    def program(*keys):
        index = jax.lax.axis_index("replica")
        return [jax.random.fold_in(x, index) for x in keys]

    key = jax.random.key(0, impl=impl)
    traced = jax.make_jaxpr(program, axis_env=[("replica", 8)])(key, key)
    assert replica_keys._take_folds(traced) == (traced, [])
