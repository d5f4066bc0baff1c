"""Branches of a `cond` whose results are split in different ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tpudist

split = jax.lax.with_sharding_constraint
GEOMETRIES = [{"fsdp": 2}, {"fsdp": 8}, {"fsdp": 2, "tensor": 2}]


def choose(x, split=split):
    return jax.lax.cond(
        x[0, 0] > 0, lambda x: split(jnp.sin(x), P("fsdp")), lambda x: split(x, P(None, "fsdp")), x
    )


def nested(x, split=split):
    def turn(_, x):
        y = jax.lax.cond(x[1, 1] > 5, lambda x: choose(x, split), lambda x: -x, x)
        return jax.jit(choose, static_argnums=1)(y, split)

    return jax.lax.fori_loop(0, 3, turn, x)


def gradient(x, split=split):
    return jax.grad(lambda x: jnp.square(choose(x, split)).sum())(x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("axes", GEOMETRIES, ids=str)
@pytest.mark.parametrize("function", [choose, nested, gradient])
def test_results_match_one_device(function, axes, sign):
    x = sign * jnp.arange(1.0, 65).reshape(8, 8)
    found = tpudist.TPUStrategy(replica_axes=axes).run(function, args=(x,))
    wanted = jax.jit(lambda x: function(x, lambda x, spec: x))(x)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.slow
def test_results_of_any_type():
    """Weak types, typed keys, and an operand that a branch gives back as it is."""

    def several(x, key):
        other = jax.lax.cond(
            x[0, 0] > 0, lambda key: key, lambda key: jax.random.fold_in(key, 1), key
        )
        number = jax.lax.cond(x[0, 0] > 5, lambda: 2.0, lambda: 3.0)
        return x.astype(jnp.bfloat16) * number, jax.random.key_data(other)

    x, key = jnp.ones((8, 8)), jax.random.key(3)
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2, "tensor": 2})
    found = strategy.run(several, args=(x, key))
    wanted = several(x, key)
    assert found[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])
