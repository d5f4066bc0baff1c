"""Reproduces, in plain JAX, the bugs of XLA that end a process or give wrong numbers.

tpudist works around them for every model. `tests/lowering/workarounds/test_partitioner_bugs.py`
runs each in a separate process, and fails when a bug is fixed: then you can delete its workaround.

    export XLA_FLAGS=--xla_force_host_platform_device_count=8
    python -m tpudist.lowering.workarounds.partitioner_bugs lookup
"""

import dataclasses
import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_VERSIONS = ("0.10.2", "0.12.0.1")
_LOOKUP_MESSAGE = "Check failed: partition_group_list.num_replica_groups()"
_COPIES_MESSAGE = "a sum counts copies"
_GROUPS_MESSAGE = "the groups differ"


@dataclasses.dataclass(frozen=True)
class Bug:
    """A program that fails on 8 emulated CPU devices.

    Attributes:
        affected: Programs that have the bug, as a phrase.
        message: Part of the last line of output, from XLA or from this file's comparison.
        versions: Versions of jaxlib that have the bug.
        workaround: Module with the workaround.
        reproduce: Called without arguments; compiles or runs the smallest known program.
    """

    affected: str
    message: str
    versions: tuple[str, ...]
    workaround: str
    reproduce: Callable[[], object]


def _mesh(**axes: int) -> Mesh:
    grid = np.asarray(jax.devices()[: int(np.prod(list(axes.values())))])
    automatic = (AxisType.Auto,) * len(axes)
    return Mesh(grid.reshape(tuple(axes.values())), tuple(axes), axis_types=automatic)


def _in_replicas(mesh: Mesh, body: Callable[..., jax.Array], *specs: PartitionSpec):
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(),
        axis_names=frozenset({"replica"}),
        check_vma=False,
    )


def _compile(function: Callable[..., jax.Array], mesh: Mesh, *inputs: tuple) -> object:
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, dtype, spec in inputs
    ]
    return jax.jit(function).lower(*shapes).compile()


def _look_up() -> object:
    mesh = _mesh(replica=2, fsdp=2, tensor=2)

    def gradient(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return jax.grad(lambda table: jnp.square(table[tokens[0]]).sum())(table)

    replicas = _in_replicas(mesh, gradient, PartitionSpec(), PartitionSpec("replica"))
    table = ((64, 32), jnp.float32, ("fsdp",))
    return _compile(replicas, mesh, table, ((2, 8, 16), jnp.int32, ("replica", "fsdp")))


def _pick() -> object:
    mesh = _mesh(replica=2, data=2, fsdp=2)

    def pick(logits: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.take_along_axis(logits, targets[0][..., None], axis=-1)

    replicas = _in_replicas(mesh, pick, PartitionSpec(), PartitionSpec("replica"))
    logits = ((8, 16, 64), jnp.float32, (None, "data", "fsdp"))
    return _compile(replicas, mesh, logits, ((2, 8, 16), jnp.int32, ("replica", "data")))


def _add_16_bit_floats(sizes: tuple[int, int]) -> object:
    mesh = _mesh(replica=sizes[0], fsdp=sizes[1])
    replicas = _in_replicas(mesh, lambda x: jax.lax.psum(x, "replica"), PartitionSpec("replica"))
    return _compile(replicas, mesh, ((sizes[0], 8), jnp.bfloat16, ("replica",)))


def _count_copies(split_rows: bool) -> object:
    """Sums over a dim that axis `a` splits. XLA also adds the two copies along axis `b`."""
    mesh = _mesh(a=2, b=2)

    def gradient(x: jax.Array, groups: int) -> jax.Array:
        def convolve(kernel: jax.Array) -> jax.Array:
            numbers = ("NWC", "WIO", "NWC")
            return jax.lax.conv_general_dilated(
                x, kernel, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
            )

        return jax.grad(lambda kernel: jnp.sin(convolve(kernel)).sum())(kernel)

    x = jnp.cos(jnp.arange(8 * 8 * 4, dtype=jnp.float32)).reshape(8, 8, 4)
    groups = 4 if split_rows else 1
    kernel = jnp.ones((3, 4 // groups, 4))
    split = NamedSharding(mesh, PartitionSpec("a") if split_rows else PartitionSpec(None, "a"))
    computed = jax.jit(gradient, static_argnums=1)
    expected, actual = computed(x, groups), computed(jax.device_put(x, split), groups)
    assert np.allclose(actual, expected, rtol=1e-3), _COPIES_MESSAGE
    return actual


def _convolve_groups() -> object:
    mesh = _mesh(a=2)
    numbers = jax.lax.ConvDimensionNumbers((3, 0, 1, 2), (3, 0, 1, 2), (2, 3, 0, 1))

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=4
        )

    x = jnp.cos(jnp.arange(4 * 5 * 5, dtype=jnp.float32)).reshape(4, 5, 5, 1)
    kernel = jnp.sin(jnp.arange(3 * 3 * 16, dtype=jnp.float32)).reshape(1, 3, 3, 16)
    computed = jax.jit(convolve)
    expected = computed(x, kernel)
    actual = computed(jax.device_put(x, NamedSharding(mesh, PartitionSpec("a"))), kernel)
    assert np.allclose(actual, expected, rtol=1e-3), _GROUPS_MESSAGE
    return actual


def _transform() -> object:
    mesh = _mesh(a=2, b=2)

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sin(jnp.abs(jnp.fft.fft(x))).sum())(x)

    split = NamedSharding(mesh, PartitionSpec(None, None, "b"))
    x = jnp.cos(jnp.arange(8 * 8 * 8, dtype=jnp.float32)).reshape(8, 8, 8)
    return jax.jit(gradient)(jax.device_put(x, split)).block_until_ready()


def _branch_in_two_ways() -> object:
    mesh = _mesh(a=2)

    def branch(*spec: str | None) -> Callable[[jax.Array], jax.Array]:
        split = NamedSharding(mesh, PartitionSpec(*spec))
        return lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), split)

    def choose(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, branch("a"), branch(None, "a"), x)

    return _compile(choose, mesh, ((4, 4), jnp.float32, ()))


BUGS = {
    "lookup": Bug(
        "A gather or a scatter in a function that is manual over an axis of several devices and "
        "leaves two or more axes to XLA, if one of these splits both the table and the indices.",
        _LOOKUP_MESSAGE,
        _VERSIONS,
        "tpudist.lowering.workarounds.lookup_layouts",
        _look_up,
    ),
    "pick": Bug(
        "The same if the table shares dims with the indices, as in a logit by its index.",
        _LOOKUP_MESSAGE,
        _VERSIONS,
        "tpudist.lowering.workarounds.entry_selection",
        _pick,
    ),
    "grouped kernels": Bug(
        "The gradient of the kernels of a grouped convolution, if one axis splits the rows and "
        "another one does not: the result is a multiple of the correct one.",
        _COPIES_MESSAGE,
        _VERSIONS,
        "tpudist.lowering.workarounds.convolution_layouts",
        functools.partial(_count_copies, True),
    ),
    "a split spatial dim": Bug(
        "A convolution with a spatial dim that one axis splits and another one does not: its "
        "gradient, and with groups its result, is a multiple of the correct one.",
        _COPIES_MESSAGE,
        _VERSIONS,
        "tpudist.lowering.workarounds.convolution_layouts",
        functools.partial(_count_copies, False),
    ),
    "groups of features": Bug(
        "A convolution whose channels are not the last dims, with groups of features that an axis "
        "splits: its result is wrong.",
        _GROUPS_MESSAGE,
        _VERSIONS,
        "tpudist.lowering.workarounds.convolution_layouts",
        _convolve_groups,
    ),
    "transform": Bug(
        "The gradient of a Fourier transform over a dim that an axis splits (CPU only).",
        "IsMonotonicWithDim0Major",
        _VERSIONS,
        "tpudist.lowering.workarounds.fft_layouts",
        _transform,
    ),
    "branches": Bug(
        "A `cond` of one result whose branches end with different sharding constraints.",
        "Inconsistent conditional sharding",
        _VERSIONS,
        "tpudist.lowering.workarounds.branch_layouts",
        _branch_in_two_ways,
    ),
    "sum of 16-bit floats": Bug(
        "A sum of bfloat16 over a manual axis, next to an axis that is left to XLA (CPU only).",
        "Invalid binary instruction opcode copy",
        _VERSIONS,
        "tpudist.lowering.workarounds.collective_layouts",
        functools.partial(_add_16_bit_floats, (2, 2)),
    ),
    "next to an axis of one device": Bug(
        "The same if the axis that is left to XLA has one device (CPU only).",
        "Invalid binary instruction opcode copy",
        _VERSIONS,
        "tpudist.xla.mesh",
        functools.partial(_add_16_bit_floats, (2, 1)),
    ),
}

if __name__ == "__main__":
    BUGS[sys.argv[1]].reproduce()
