"""Collectives that a program asks for by itself: in replicas of any size, of any dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpudist.lowering import compile
from tpudist.xla.mesh import make_mesh

COLLECTIVES = {
    "psum": lambda x: jax.lax.psum(x, "replica"),
    "psum of a pytree": lambda x: jax.lax.psum({"a": x, "b": x[0]}, "replica")["b"],
    "pmean": lambda x: jax.lax.pmean(x, "replica"),
    "pmax": lambda x: jax.lax.pmax(x, "replica"),
    "pmin": lambda x: jax.lax.pmin(x, "replica"),
    "all_gather": lambda x: jax.lax.all_gather(x, "replica"),
    "all_gather, tiled": lambda x: jax.lax.all_gather(x, "replica", axis=1, tiled=True),
    "psum_scatter": lambda x: jax.lax.psum_scatter(x, "replica", scatter_dimension=1, tiled=True),
    "all_to_all": lambda x: jax.lax.all_to_all(x, "replica", 1, 0, tiled=True),
    "ppermute": lambda x: rotate(x),
    "in a loop": lambda x: jax.lax.fori_loop(0, 2, lambda _, x: jax.lax.psum(x, "replica"), x),
    "gradient": lambda x: jax.grad(lambda x: jnp.sum(jax.lax.psum(x, "replica") * x).real)(x),
    "axis_index": lambda x: x + jax.lax.axis_index("replica").astype(x.dtype),
}
EXTREMES = ("pmax", "pmin")


def rotate(x):
    n = jax.lax.axis_size("replica")
    return jax.lax.ppermute(x, "replica", [(i, (i + 1) % n) for i in range(n)])


def run(function, x, inner_axes):
    """The results of all replicas, each one after the other, and what JAX gives."""
    mesh = make_mesh(jax.devices(), inner_axes)
    given = x[: mesh.num_replicas]
    program = compile.trace(function, mesh, [compile.shape_of(given)], [True])
    spread = compile.spread(program, mesh, [True] * len(program.closed.out_avals))
    found = jax.jit(spread)(jax.device_put(given, mesh.stacked))
    wanted = jax.jit(jax.vmap(function, axis_name="replica"))(given)
    return [np.asarray(x) for x in found], [np.asarray(x) for x in wanted]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "dtype",
    [
        jnp.float32,
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in (jnp.bfloat16, jnp.float16, jnp.complex64, jnp.int32)
        ),
    ],
)
@pytest.mark.parametrize(
    "inner_axes", [{"fsdp": 8}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {}], ids=str
)
def test_replicas_of_any_size_have_what_jax_says(inner_axes, dtype):
    """All collectives in one program, which is compiled once."""
    without = {"c": EXTREMES, "i": ("gradient",)}.get(np.dtype(dtype).kind, ())  # JAX has none
    names = [name for name in COLLECTIVES if name not in without]
    x = jnp.arange(8 * 2 * 8).reshape(8, 2, 8).astype(dtype)
    results = run(lambda x: [COLLECTIVES[name](x) for name in names], x, inner_axes)
    for name, found, wanted in zip(names, *results, strict=True):
        assert found.dtype == wanted.dtype, name
        np.testing.assert_allclose(
            found.astype(complex), wanted.astype(complex), rtol=1e-2, err_msg=name
        )


@pytest.mark.parametrize("inner_axes", [{"fsdp": 8}, {"fsdp": 4}, {}], ids=str)
def test_the_sum_of_a_complex_constant(inner_axes):
    """XLA:CPU ends the process over it."""
    (found,), (wanted,) = run(
        lambda x: [jax.lax.psum(1j, "replica") * x], jnp.ones((8, 2)), inner_axes
    )
    np.testing.assert_array_equal(found, wanted)


def test_what_is_sent_to_nobody():
    mesh = make_mesh(jax.devices(), {"fsdp": 8})
    x = jnp.ones((1, 2))
    program = compile.trace(
        lambda x: [jax.lax.ppermute(x, "replica", [])], mesh, [compile.shape_of(x)], [True]
    )
    (found,) = jax.jit(compile.spread(program, mesh, [True]))(x)
    np.testing.assert_array_equal(found, [[0, 0]])


def test_over_an_axis_of_the_users_too():
    def by_hand(x):
        def body(x):
            return jax.lax.psum(x, ("replica", "fsdp"))

        spec = jax.sharding.PartitionSpec("fsdp")
        return jax.shard_map(
            body,
            in_specs=spec,
            out_specs=jax.sharding.PartitionSpec(),
            axis_names={"fsdp"},
            check_vma=False,
        )(x)

    mesh = make_mesh(jax.devices(), {"fsdp": 8})
    x = jnp.arange(8, dtype=jnp.float32)[None]
    program = compile.trace(lambda x: [by_hand(x)], mesh, [compile.shape_of(x)], [True])
    (found,) = jax.jit(compile.spread(program, mesh, [False]))(x)
    np.testing.assert_array_equal(found, [28])
