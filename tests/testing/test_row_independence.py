"""`assert_rowwise` runs a function on rows and detects whether it mixes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpudist.testing import assert_rowwise

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
WEIGHT = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2)), jnp.float32)


@pytest.mark.slow
def test_functions_that_treat_rows_independently_pass():
    few = X[:3]
    assert_rowwise(jnp.dot, few, WEIGHT, in_dims=(0, None))
    assert_rowwise(lambda x: (x.sum(0), x.argmax(0)), few.T, in_dims=1, out_dims=(0, 0))
    assert_rowwise(lambda i: i + 1, jnp.arange(3))
    assert_rowwise(jnp.sin, few.astype(jnp.bfloat16))


@jax.custom_vjp
def mixing_backward(x):
    return x


mixing_backward.defvjp(lambda x: (x, None), lambda _, ct: (ct + ct[::-1],))


@jax.custom_vjp
def own_length(x, weight):
    return x @ weight


own_length.defvjp(
    lambda x, weight: (x @ weight, (x, weight)),
    lambda saved, ct: (ct @ saved[1].T, saved[0].T @ ct / len(ct)),
)


@pytest.mark.parametrize(
    ("function", "args", "in_dims", "seen"),
    [
        (lambda x: x - x.mean(0), (X,), 0, "Result 0 for the first 1 of 4 rows depends on"),
        (lambda x: jnp.cumsum(x, 0, dtype=x.dtype)[::-1], (X,), 0, "depends on the other rows"),
        (lambda x: x / len(x), (X,), 0, "differs from the result for only these rows"),
        (mixing_backward, (X,), 0, "The gradient of array 0 .* differs from|depends on"),
        (own_length, (X, WEIGHT), (0, None), "The gradient of array 1 .* differs from"),
        (lambda i: i[::-1], (jnp.arange(4),), 0, "depends on the other rows"),
    ],
)
def test_functions_that_mix_rows_fail(function, args, in_dims, seen):
    with pytest.raises(AssertionError, match=seen):
        assert_rowwise(function, *args, in_dims=in_dims)


def test_gradient_false_skips_the_gradient():
    assert_rowwise(mixing_backward, X, gradient=False)


def test_one_row_is_not_enough():
    with pytest.raises(ValueError, match="but received 1"):
        assert_rowwise(jnp.sin, X[:1])
