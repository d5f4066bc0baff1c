"""Rotary positions: two implementations and their properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from tpudist.models.parts import rotary
from tpudist.planner import model_flops


def heads(length=9, width=8, dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed), (2, length, 3, width), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "width", [8, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 128))]
)
def test_rotation_by_product_matches_rotation_by_halves_and_its_gradient(dtype, width):
    x, out = heads(width=width, dtype=dtype), heads(width=width, dtype=dtype, seed=1)
    rotation = rotary.rotation(x.shape[1], width, 10_000.0)
    found, back = jax.vjp(lambda x: rotary.rotate_by_product(x, rotation), x)
    want, want_back = jax.vjp(lambda x: rotary.rotate_by_halves(x, rotation), x)
    assert found.dtype == x.dtype
    tolerance = 1e-6 if dtype == "float32" else 1e-2
    for a, b in ((found, want), (back(out)[0], want_back(out)[0])):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance
        )


@pytest.mark.slow
@given(query=st.integers(0, 99), key=st.integers(0, 99), shift=st.integers(0, 100))
def test_scores_depend_only_on_distances(query, key, shift):
    rotation = rotary.rotation(200, 8, 100.0)
    x = jnp.broadcast_to(heads(1)[:1], (1, 200, 3, 8))
    y = jnp.broadcast_to(heads(1, seed=1)[:1], (1, 200, 3, 8))
    x, y = (np.asarray(rotary.rotate_by_halves(z, rotation), np.float64)[0] for z in (x, y))
    here, there = (np.sum(x[query + n] * y[key + n]) for n in (0, shift))
    assert here == pytest.approx(there, abs=1e-4)


def test_a_rotation_counts_no_flops():
    """The product only moves values, so a model has the same FLOPs on every platform."""
    rotation = rotary.rotation(9, 8, 100.0)
    turn = jax.grad(lambda x: rotary.rotate_by_product(x, rotation).sum())
    assert model_flops.model_flops(jax.make_jaxpr(turn)(heads()), 1)[0] == {}
