"""Splits values over the devices of one replica, its *logical devices*, by counts per dim.

`tf.distribute` specifies the number of parts of each dim; XLA needs the mesh axes that split it.
The devices of a replica are numbered row by row along the axes inside a replica, and the parts of a
value row by row along its dims, as in TensorFlow.
"""

import collections
import contextlib
import contextvars
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from tpudist import context
from tpudist.context.strategy_base import StrategyBase
from tpudist.options import warn_if_given
from tpudist.values.per_replica import LocalPart, PerReplica, local_part
from tpudist.xla.mesh import ReplicaMesh
from tpudist.xla.traces import is_eager


@runtime_checkable
class HasDeviceAssignment(Protocol):
    """A strategy that may have a device assignment: TPUStrategy, of a higher layer."""

    device_assignment: object


def prime_axes(num_devices: int) -> dict[str, int]:
    """Returns axes `logical_0`, `logical_1`, ... of prime sizes whose product is `num_devices`.

    With prime sizes, every choice of counts with that product is a split over whole axes.
    """
    # Trial division. It ends, because each factor that divides makes `num_devices` smaller and each
    # other factor makes `factor` larger, up to `num_devices` itself.
    sizes = []
    factor = 2
    while num_devices > 1:
        while num_devices % factor == 0:
            sizes.append(factor)
            num_devices //= factor
        factor += 1
    return {f"logical_{i}": size for i, size in enumerate(sizes)}


def spec_of_split(
    axes: Mapping[str, int], shape: Sequence[int], partition_dimensions: Sequence[int]
) -> PartitionSpec:
    """Returns the mesh axes that cut each dim of `shape` into the requested number of parts.

    Args:
        axes: Sizes of the mesh axes inside a replica, by name.
        shape: Shape of the value.
        partition_dimensions: Number of parts along each dim. Their product must be the number of
            devices of a replica.

    Raises:
        ValueError: If there is not one count per dim, a dim does not divide by its count, the
            product is different, or a count is not a product of whole axes.
    """
    counts = [_count(x, partition_dimensions) for x in partition_dimensions]
    if len(counts) != len(shape):
        raise ValueError(
            f"Length of `partition_dimensions` must equal the rank of the value ({len(shape)}, of "
            f"shape {tuple(shape)}). Received partition_dimensions={list(counts)}: give one count "
            f"for each dim, 1 for a dim that stays whole."
        )
    for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
        if size % count:
            raise ValueError(
                f"Dim {dim} of a value of shape {tuple(shape)} must be divisible by the "
                f"corresponding value of `partition_dimensions` ({count}). Received: {size}."
            )
    num_devices = math.prod(axes.values())
    if math.prod(counts) != num_devices:
        raise ValueError(
            f"The product of `partition_dimensions` should be the same as the number of logical "
            f"devices of a replica (={num_devices}). Received partition_dimensions={list(counts)}, "
            f"and their product is {math.prod(counts)}."
        )
    # Axes of size 1 split nothing, and would only add equal solutions to the search.
    found = next(_assignments({a: n for a, n in axes.items() if n > 1}, counts), None)
    if found is None:
        named = ", ".join(f"{axis}={size}" for axis, size in axes.items())
        sizes = list(axes.values())
        possible = {math.prod(sizes[i] for i in subset) for subset in _subsets(len(sizes))}
        raise ValueError(
            f"partition_dimensions={list(counts)} does not split over the axes of a replica, "
            f"{named}: every axis must split one whole dim. One dim can be cut into "
            f"{', '.join(map(str, sorted(possible)))} parts. Choose other counts, or axes of "
            "smaller sizes."
        )
    return PartitionSpec(*found)


def _count(count: object, all_counts: Sequence[object]) -> int:
    number = 0
    if isinstance(count, SupportsIndex) and not isinstance(count, bool):
        number = operator.index(count)
    if number < 1:
        raise ValueError(
            f"partition_dimensions={all_counts!r} holds {count!r}. Each count must be an integer "
            "of at least 1."
        )
    return number


def _subsets(number: int) -> list[tuple[int, ...]]:
    """Returns the subsets of range(number) in lexicographic order."""
    sizes = range(number + 1)
    return sorted(
        subset for size in sizes for subset in itertools.combinations(range(number), size)
    )


def _assignments(axes: dict[str, int], counts: Sequence[int]) -> Iterator[list[tuple[str, ...]]]:
    """Yields the ways to write each count as a product of axes; those in mesh order first."""
    if not counts:
        if not axes:
            yield []
        return
    # Backtracking: take a subset of axes for the first count, and solve the rest recursively. It
    # ends because each level has one count less, and is fast because a replica has few axes.
    for subset in _subsets(len(axes)):
        names = tuple(list(axes)[i] for i in subset)
        if math.prod(axes[name] for name in names) == counts[0]:
            rest = {name: size for name, size in axes.items() if name not in names}
            for others in _assignments(rest, counts[1:]):
                yield [names, *others]


def split(
    mesh: ReplicaMesh, value: ArrayLike | PerReplica, partition_dimensions: Sequence[int]
) -> Any:
    """Returns `value` cut over the devices of each replica; see `spec_of_split`."""
    axes = {axis: mesh.mesh.shape[axis] for axis in mesh.inner_axes}
    own = _local_value(value)
    return _constrain(mesh, own, spec_of_split(axes, own.shape, partition_dimensions))


def replicate(mesh: ReplicaMesh, value: ArrayLike | PerReplica) -> Any:
    """Returns `value` as a whole copy on every device of a replica."""
    own = _local_value(value)
    return _constrain(mesh, own, PartitionSpec(*(None,) * len(own.shape)))


def _local_value(value: ArrayLike | PerReplica) -> Any:
    """Returns an array; in a replica function the replica's own, elsewhere a PerReplica stays."""
    mode = context.current()
    in_replica = mode.frame is not None and mode.replica_context is not None
    stays = isinstance(value, PerReplica) and not in_replica
    return value if stays else jnp.asarray(local_part(value))


def _constrain(mesh: ReplicaMesh, value: jax.Array | PerReplica, spec: PartitionSpec) -> Any:
    tracing = context.current().frame is not None
    # In a trace, the axis of replicas is manual: only the axes inside a replica may be named, and
    # the value is the replica's own part. Outside, the array is stacked, with the axis of replicas
    # as its first dim.
    if isinstance(value, PerReplica) and tracing:
        return LocalPart(_constrain(mesh, local_part(value), spec))
    if isinstance(value, PerReplica):
        stacked = NamedSharding(mesh.mesh, PartitionSpec(mesh.replica_axis, *spec))
        return PerReplica(_place(value.array, stacked), value.rows, value.dim, value.other_rows)
    # `spec` names only axes inside a replica, so each replica gets a copy.
    if not tracing:
        return _place(value, NamedSharding(mesh.mesh, spec))
    if mesh.devices_per_replica == 1:
        return value  # and XLA knows no axes here that are not manual
    return jax.lax.with_sharding_constraint(value, spec)


def _place(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    # Under `jax.jit` of the user, outside of any frame of tpudist, there is no array to move.
    if not is_eager():
        return jax.lax.with_sharding_constraint(value, sharding)
    return jax.device_put(value, sharding)


NO_SINGLE_DEVICE = (
    "XLA splits the work of a replica over all its logical devices; split values instead, with "
    "experimental_split_to_logical_devices"
)


def check_device(mesh: ReplicaMesh, logical_device_id: int) -> None:
    """Checks the number of a logical device.

    Raises:
        ValueError: If it is negative, or not below the number of devices of a replica.
    """
    num_devices = mesh.devices_per_replica
    if not isinstance(logical_device_id, int) or not 0 <= logical_device_id < num_devices:
        raise ValueError(
            f"`logical_device_id` to assign must be lower than the total number of logical devices "
            f"per replica. Received logical device id {logical_device_id!r} but there are only "
            f"total of {num_devices} logical devices in a replica."
        )


def devices_at(mesh: ReplicaMesh, logical_device_id: int) -> tuple[jax.Device, ...]:
    """Returns the logical device of this number in each replica."""
    return tuple(mesh.replica_devices[:, logical_device_id])


# The strategy and the number of the innermost `choose` block. A context variable, so that a block
# in one thread does not change the devices that another sees.
_chosen: contextvars.ContextVar[tuple[StrategyBase, int] | None] = contextvars.ContextVar(
    "tpudist.logical_device", default=None
)


def choose(
    strategy: StrategyBase, logical_device_id: int
) -> contextlib.AbstractContextManager[None]:
    """Makes `worker_devices` the devices of this number of each replica, in a `with` block.

    Raises:
        ValueError: If replicas have no device of this number.
    """
    check_device(strategy.replica_mesh, logical_device_id)
    if strategy.replica_mesh.devices_per_replica > 1:
        argument = "experimental_logical_device(logical_device_id"
        warn_if_given(argument, logical_device_id, NO_SINGLE_DEVICE)
    return _use_device(strategy, logical_device_id)


@contextlib.contextmanager
def _use_device(strategy: StrategyBase, logical_device_id: int) -> Iterator[None]:
    token = _chosen.set((strategy, logical_device_id))
    try:
        yield
    finally:
        _chosen.reset(token)


def worker_devices(strategy: StrategyBase) -> tuple[jax.Device, ...]:
    """Returns the devices that run replica functions.

    With a device assignment, that is one device of each replica.
    """
    mesh, choice = strategy.replica_mesh, _chosen.get()
    if choice is not None and choice[0] is strategy:
        return devices_at(mesh, choice[1])
    # tf.distribute counts one worker device per replica, the first logical device. Without an
    # assignment (`replica_axes`, which tf.distribute does not have), all devices count.
    if isinstance(strategy, HasDeviceAssignment) and strategy.device_assignment is not None:
        return devices_at(mesh, 0)
    return tuple(mesh.mesh.devices.flat)


def num_replicas_per_host(mesh: ReplicaMesh) -> int:
    """Returns the largest number of replicas that have a device on the same host."""
    replicas = mesh.replica_devices
    hosts = collections.Counter(
        host for replica in replicas for host in {d.process_index for d in replica}
    )
    return max(hosts.values())
