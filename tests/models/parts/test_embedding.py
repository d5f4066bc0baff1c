"""Lookups in a table: the method of the gradient depends on the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from tpudist.models.parts.embedding import lookup
from tpudist.models.parts.logical import constrain
from tpudist.planner import model_flops
from tpudist.xla import topology
from tpudist.xla.hlo import collective_ops

BATCH, LENGTH, VOCABULARY, EMBED = 8, 2048, 32_000, 128


def gradient(table, tokens):
    def loss(table):
        rows = lookup(constrain(table, "vocab", None), tokens)
        return jnp.cos(constrain(rows, "batch", None, None)).sum()

    return jax.grad(loss)(table)


@pytest.mark.slow
def test_a_lookup_returns_rows_and_its_gradient_adds_to_them():
    table = jax.random.normal(jax.random.key(0), (6, 3))
    tokens = jnp.array([[0, 5, 2], [2, 2, 1]])
    np.testing.assert_array_equal(lookup(table, tokens), table[tokens])
    want = jax.grad(lambda table: jnp.cos(table[tokens]).sum())(table)
    np.testing.assert_allclose(gradient(table, tokens), want, rtol=1e-6)


@pytest.mark.slow
def test_an_index_out_of_range_reads_the_nearest_row_and_has_no_gradient():
    table = jnp.arange(12.0).reshape(4, 3)
    tokens = jnp.array([[-5, -1, 4, 9]])
    np.testing.assert_array_equal(lookup(table, tokens)[0], table[jnp.array([0, 0, 3, 3])])
    assert not gradient(table, tokens).any()


def test_many_small_gradients_of_one_row_are_summed_in_float32():
    table = jnp.zeros((4, 2), jnp.bfloat16)
    tokens = jnp.zeros((1, 3000), jnp.int32)
    found = jax.grad(lambda table: lookup(table, tokens).astype(jnp.float32).sum())(table)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found[0].astype(jnp.float32), 3000, rtol=0.01)


def compiled(devices) -> jax.stages.Compiled:
    """Compiles the gradient of a table, for rows that are split over devices."""
    mesh = jax.make_mesh(
        (1, len(devices)), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )
    table = jax.ShapeDtypeStruct(
        (VOCABULARY, EMBED), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp"))
    )
    tokens = jax.ShapeDtypeStruct(
        (BATCH, LENGTH), jnp.int32, sharding=NamedSharding(mesh, P("fsdp"))
    )
    with jax.set_mesh(mesh), nnx.logical_axis_rules((("batch", "fsdp"),)):
        function = jax.jit(gradient, out_shardings=table.sharding)
        flops, _ = model_flops.model_flops(jax.make_jaxpr(gradient)(table, tokens), 1)
        assert not sum(flops.values())  # no method of a lookup counts as FLOPs
        return function.lower(table, tokens).compile()


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_cpu_stores_no_row_for_each_token_and_entry(num_devices):
    program = compiled(jax.devices()[:num_devices])
    assert program.memory_analysis().temp_size_in_bytes < BATCH * LENGTH * VOCABULARY / 10
    assert "one_hot" not in program.as_text()


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_tpu_with_split_rows_gathers_only_the_table():
    program = compiled(topology.devices("v5e:2x2"))
    text = program.as_text()
    assert " scatter(" not in text
    gathered = {x.num_bytes for x in collective_ops.collectives(text) if x.kind == "all-gather"}
    assert gathered == {4 * VOCABULARY * EMBED}  # the table, for the forward lookup
    assert program.memory_analysis().temp_size_in_bytes < BATCH * LENGTH * VOCABULARY / 10


@pytest.mark.slow
@pytest.mark.libtpu
def test_one_tpu_uses_scatter():
    assert "in_place_of_scatter" not in compiled(topology.devices("v5e:1x1")).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(
    "shape",
    [(2, 2, 2), *(pytest.param(x, marks=pytest.mark.exhaustive) for x in [(1, 2, 4), (1, 4, 2)])],
)
def test_a_split_table_returns_the_rows_of_the_unsplit_table(shape, dtype):
    """XLA's partitioner would crash the process without our method (jaxlib 0.12)."""
    mesh = jax.make_mesh(shape, ("replica", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    table = jax.random.normal(jax.random.key(0), (16, 8)).astype(dtype)
    tokens = jax.random.randint(jax.random.key(1), (8, 5), -2, 18).astype(jnp.int32)
    split = P(("replica", "fsdp"))

    def both(table, tokens):
        rows = lookup(constrain(table, "vocab", None), tokens)
        return rows, gradient(table, tokens)

    with jax.set_mesh(mesh), nnx.logical_axis_rules((("batch", "fsdp"), ("vocab", "tensor"))):
        placed = jax.device_put(table, NamedSharding(mesh, P("tensor", "fsdp")))
        given = jax.device_put(tokens, NamedSharding(mesh, split))
        rows, found = jax.jit(both)(placed, given)
    np.testing.assert_array_equal(rows, lookup(table, tokens))
    np.testing.assert_allclose(
        found.astype(jnp.float32),
        gradient(table, tokens).astype(jnp.float32),
        rtol=1e-6 if dtype == jnp.float32 else 0.02,  # one unit of bfloat16
    )
