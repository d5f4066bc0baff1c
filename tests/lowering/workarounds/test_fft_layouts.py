"""Fourier transforms of arrays that are split inside a replica."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tpudist

TRANSFORMS = {
    "fft": lambda x: jnp.fft.fft(x),
    "fft2": lambda x: jnp.fft.fft2(x),
    "rfft, irfft": lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 2),
}


@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 8},
        pytest.param({"fsdp": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x == "fft2" else pytest.mark.exhaustive) for x in TRANSFORMS],
)
def test_gradients_over_a_split_dim_match_one_device(name, axes):
    def gradient(x, split=lambda x: x):
        def loss(x):
            return jnp.sin(jnp.abs(TRANSFORMS[name](split(x)))).sum()

        return jax.grad(loss)(x)

    def on_mesh(x):
        spec = P(None, None, tuple(axes)[-1])
        return gradient(x, lambda x: jax.lax.with_sharding_constraint(x, spec))

    x = jnp.cos(jnp.arange(8 * 8 * 8, dtype=jnp.float32)).reshape(8, 8, 8)
    found = tpudist.TPUStrategy(replica_axes=axes).run(on_mesh, args=(x,))
    np.testing.assert_allclose(found, jax.jit(gradient)(x), atol=1e-4)
