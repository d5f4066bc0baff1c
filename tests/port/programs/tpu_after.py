# Copies of a matrix product on the cores of a TPU, or on emulated devices.
from __future__ import annotations

import jax.numpy as jnp
import tpudist
from tpudist import get_strategy

if __name__ == "__main__":
    resolver = tpudist.cluster_resolver.TPUClusterResolver(tpu="local")
    strategy = tpudist.TPUStrategy(resolver)
    assert get_strategy() is not strategy

    a = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    b = jnp.ones((2, 2))

    def matmul(x, y):
        z = jnp.matmul(x, y)
        return jnp.where(jnp.greater(z, 4.0), z, jnp.zeros_like(z))

    z = strategy.run(matmul, args=(a, b))
    print("Sum of all:", float(strategy.reduce(tpudist.ReduceOp.SUM, z, axis=[0, 1])))
