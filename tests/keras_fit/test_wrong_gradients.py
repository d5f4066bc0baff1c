"""Demonstrates an XLA bug, which is why an uneven batch is split over every axis of a mesh.

XLA silently computes wrong gradients of a gather if an uneven dim is split over some axes of the
mesh and another axis replicates it: the gradients of row 0 include the padding. The test uses plain
JAX; run it on each new jaxlib. If it fails, Keras models with an Embedding are wrong on uneven
batches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(64, 32)).astype("float32")
OUT = RNG.normal(size=(32, 4)).astype("float32")
TARGETS = RNG.normal(size=(64, 4)).astype("float32")


def loss(table, ids, targets):
    return ((table[ids].mean(1) @ OUT - targets) ** 2).mean()


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [7, 15])
@pytest.mark.parametrize(
    ("shape", "table_spec"),
    [
        ((8, 1), PartitionSpec()),
        ((4, 2), PartitionSpec()),
        ((4, 2), PartitionSpec(None, "model")),
        ((4, 2), PartitionSpec("model", None)),
    ],
)
def test_gradients_of_a_gather_are_right_if_rows_are_split_over_all_axes(shape, table_spec, rows):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("replica", "model"))
    split = NamedSharding(mesh, PartitionSpec(("replica", "model")))
    table_sharding = NamedSharding(mesh, table_spec)
    ids = RNG.integers(1, 64, (rows, 12)).astype("int32")  # no 0, because padding is 0

    def pad(x):
        padding = np.zeros((-rows % 8, *x.shape[1:]), x.dtype)
        return jax.device_put(np.concatenate([x, padding]), split)

    def cut(x):
        return jax.lax.with_sharding_constraint(x[:rows], split)

    step = jax.jit(
        lambda table, i, t: jax.grad(loss)(table, cut(i), cut(t)), out_shardings=table_sharding
    )
    targets = TARGETS[:rows]
    found = step(jax.device_put(TABLE, table_sharding), pad(ids), pad(targets))
    wanted = jax.jit(jax.grad(loss))(TABLE, ids, targets)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(wanted).max()) > 0.05
