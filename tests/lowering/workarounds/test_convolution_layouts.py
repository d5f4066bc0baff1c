"""Convolutions in replicas of several axes, split in whatever way: what one device computes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tpudist.lowering import compile
from tpudist.lowering.workarounds import convolution_layouts
from tpudist.xla.mesh import make_mesh

ROWS, SIZE = 8, 8
SPLITS = {
    "whole": P(),
    "rows": P("fsdp"),
    "channels": P(None, None, None, "tensor"),
    "rows and channels": P("fsdp", None, None, "tensor"),
    "a spatial dim": P(None, "tensor"),
    "rows and a spatial dim": P("fsdp", "tensor"),
}
GROUPS = {"ungrouped": (1, 8, 8), "depthwise": (8, 8, 8), "grouped": (2, 8, 16)}


def convolve(x, kernel, groups):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def run(function, axes, *arrays):
    """What one replica of all devices computes of arrays that it has whole."""
    mesh = make_mesh(jax.devices()[:4], axes)
    assert mesh.num_replicas == 1
    shapes = [compile.shape_of(x) for x in arrays]
    whole = [False] * len(arrays)
    program = compile.trace(lambda *args: list(function(*args)), mesh, shapes, whole)
    outputs = len(program.closed.out_avals)
    arrays = [jax.device_put(x, mesh.replicated) for x in arrays]
    return jax.jit(compile.spread(program, mesh, [False] * outputs))(*arrays)


def arrays_of(kind):
    groups, channels, features = GROUPS[kind]
    rng = np.random.default_rng(0)
    shapes = [(ROWS, SIZE, SIZE, channels), (3, 3, channels // groups, features)]
    return [jnp.asarray(rng.normal(size=x), jnp.float32) for x in shapes]


# Each run has these, and a share of the others.
CORE = [("depthwise", "rows and channels"), ("grouped", "channels"), ("ungrouped", "rows")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "of_x"),
    [
        pytest.param(*each, marks=() if each in CORE else pytest.mark.exhaustive)
        for each in itertools.product(GROUPS, SPLITS)
    ],
)
def test_results_and_gradients_match_one_device(kind, of_x):
    x, kernel = arrays_of(kind)

    def function(x, kernel, split=lambda x, spec: x):
        """With the input and the result split; gradients are then split alike."""

        def loss(x, kernel, of_y):
            y = convolve(split(x, SPLITS[of_x]), kernel, GROUPS[kind][0])
            return jnp.sin(split(y, of_y)).sum()

        gradients = [jax.grad(loss, argnums=(0, 1))(x, kernel, of_y) for of_y in SPLITS.values()]
        return [convolve(x, kernel, GROUPS[kind][0]), *itertools.chain(*gradients)]

    def on_mesh(x, kernel):
        return function(x, kernel, jax.lax.with_sharding_constraint)

    found = run(on_mesh, {"fsdp": 2, "tensor": 2}, x, kernel)
    for one, other in zip(found, jax.jit(function)(x, kernel), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * np.abs(other).max())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_uneven_groups_and_rows_are_not_split(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, SIZE, SIZE, 3)), dtype)
    kernel = jnp.asarray(rng.normal(size=(3, 3, 1, 3)), dtype)

    def gradient(x, kernel):
        return [jax.grad(lambda kernel: jnp.sin(convolve(x, kernel, 3)).sum())(kernel)]

    (found,) = run(gradient, {"fsdp": 2, "tensor": 2}, x, kernel)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, jax.jit(gradient)(x, kernel)[0], rtol=2e-2)


def test_the_gradient_of_grouped_kernels_moves_no_rows():
    """Each device convolves its part of the rows, of its groups: what is sent is a kernel."""
    x, kernel = arrays_of("depthwise")
    mesh = make_mesh(jax.devices()[:4], {"fsdp": 2, "tensor": 2})

    def gradient(x, kernel):
        x = jax.lax.with_sharding_constraint(x, P("fsdp", None, None, "tensor"))
        return [jax.grad(lambda kernel: jnp.sin(convolve(x, kernel, 8)).sum())(kernel)]

    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh.mesh, spec))
        for x, spec in ((x, SPLITS["rows and channels"]), (kernel, SPLITS["channels"]))
    ]
    program = compile.trace(gradient, mesh, shapes, [False, False])
    text = jax.jit(compile.spread(program, mesh, [False])).lower(*shapes).compile().as_text()
    assert f"f32[{ROWS},{SIZE},{SIZE},8]" not in text
    assert f"f32[{ROWS // 2},{SIZE},{SIZE},4]" in text


def test_nothing_is_done_where_there_is_one_axis():
    x, kernel = arrays_of("depthwise")
    mesh = make_mesh(jax.devices(), {"fsdp": 2})
    shapes = [compile.shape_of(x), compile.shape_of(kernel)]
    program = compile.trace(
        lambda x, kernel: [convolve(x, kernel, 8)], mesh, shapes, [False, False]
    )
    assert convolution_layouts.lay_out_convolutions(program.closed) is program.closed
