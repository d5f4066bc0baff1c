"""The bugs of XLA that end a process, or give wrong numbers: what each is, and plain JAX with it.

tpudist lowers around them, for every model. `tests/lowering/workarounds/test_partitioner_bugs.py`
runs each in a process of its own and fails when one is gone, so that its workaround can go too.

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


@dataclasses.dataclass(frozen=True)
class Bug:
    """A program that fails on 8 devices of a CPU.

    Attributes:
        what: Which programs have it.
        check: What is written last: by XLA, or of the wrong numbers.
        versions: Of jaxlib, where it has been seen.
        answer: The module that lowers around it.
        reproduce: Compiles or runs the smallest program that was found.
    """

    what: str
    check: str
    versions: tuple[str, ...]
    answer: str
    reproduce: Callable[[], object]


def _mesh(**axes: int) -> Mesh:
    grid = np.asarray(jax.devices()[: int(np.prod(list(axes.values())))])
    kinds = (AxisType.Auto,) * len(axes)
    return Mesh(grid.reshape(tuple(axes.values())), tuple(axes), axis_types=kinds)


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


def _count_twice(rows: bool) -> object:
    """Sums over what one axis splits; along the other one there are two copies."""
    mesh = _mesh(a=2, b=2)

    def gradient(x: jax.Array, groups: int) -> jax.Array:
        def convolve(kernel: jax.Array) -> jax.Array:
            numbers = ("NWC", "WIO", "NWC")
            return jax.lax.conv_general_dilated(
                x, kernel, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups
            )

        return jax.grad(lambda kernel: jnp.sin(convolve(kernel)).sum())(kernel)

    x = jnp.cos(jnp.arange(8 * 8 * 4, dtype=jnp.float32)).reshape(8, 8, 4)
    groups = 4 if rows else 1
    kernel = jnp.ones((3, 4 // groups, 4))
    split = NamedSharding(mesh, PartitionSpec("a") if rows else PartitionSpec(None, "a"))
    computed = jax.jit(gradient, static_argnums=1)
    wanted, found = computed(x, groups), computed(jax.device_put(x, split), groups)
    assert np.allclose(found, wanted, rtol=1e-3), "a sum counts copies"
    return found


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
    wanted = computed(x, kernel)
    found = computed(jax.device_put(x, NamedSharding(mesh, PartitionSpec("a"))), kernel)
    assert np.allclose(found, wanted, rtol=1e-3), "groups are other ones"
    return found


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


_LOOKUP = "Check failed: partition_group_list.num_replica_groups()"
_COPIES = "a sum counts copies"
BUGS = {
    "lookup": Bug(
        "A gather or a scatter in a function that is manual over an axis of several devices and "
        "leaves two or more to XLA, where one of these splits the table and the indices.",
        _LOOKUP,
        ("0.10.2", "0.12.0.1"),
        "tpudist.lowering.workarounds.lookup_layouts",
        _look_up,
    ),
    "pick": Bug(
        "The same where the table shares dims with the indices: a logit by its index.",
        _LOOKUP,
        ("0.10.2", "0.12.0.1"),
        "tpudist.lowering.workarounds.entry_selection",
        _pick,
    ),
    "grouped kernels": Bug(
        "The gradient of the kernels of a grouped convolution, where one axis splits the rows and "
        "another one does not: it is a multiple of what it should be.",
        _COPIES,
        ("0.10.2", "0.12.0.1"),
        "tpudist.lowering.workarounds.convolution_layouts",
        functools.partial(_count_twice, True),
    ),
    "a split spatial dim": Bug(
        "A convolution with a spatial dim that one axis splits and another one does not: its "
        "gradient, and with groups its result, is a multiple of what it should be.",
        _COPIES,
        ("0.10.2", "0.12.0.1"),
        "tpudist.lowering.workarounds.convolution_layouts",
        functools.partial(_count_twice, False),
    ),
    "groups of features": Bug(
        "A convolution with groups of features that an axis splits, whose channels are not its "
        "last dims: its result is wrong.",
        "groups are other ones",
        ("0.10.2", "0.12.0.1"),
        "tpudist.lowering.workarounds.convolution_layouts",
        _convolve_groups,
    ),
    "transform": Bug(
        "The gradient of a Fourier transform over a dim that an axis splits (CPU only).",
        "IsMonotonicWithDim0Major",
        ("0.10.2", "0.12.0.1"),
        "tpudist.lowering.workarounds.fft_layouts",
        _transform,
    ),
    "branches": Bug(
        "A `cond` of one result whose branches end with constraints that differ.",
        "Inconsistent conditional sharding",
        ("0.10.2", "0.12.0.1"),
        "tpudist.lowering.workarounds.branch_layouts",
        _branch_in_two_ways,
    ),
    "sum of 16-bit floats": Bug(
        "A sum of bfloat16 over a manual axis, next to an axis that is left to XLA (CPU only).",
        "Invalid binary instruction opcode copy",
        ("0.10.2", "0.12.0.1"),
        "tpudist.lowering.workarounds.collective_layouts",
        functools.partial(_add_16_bit_floats, (2, 2)),
    ),
    "next to an axis of one device": Bug(
        "The same, where the axis that is left to XLA has one device (CPU only).",
        "Invalid binary instruction opcode copy",
        ("0.10.2", "0.12.0.1"),
        "tpudist.xla.mesh",
        functools.partial(_add_16_bit_floats, (2, 1)),
    ),
}

if __name__ == "__main__":
    BUGS[sys.argv[1]].reproduce()
