"""Creates meshes of replicas: one axis of replicas, and any number of axes inside a replica.

The replica axis is *manual*: a replica function is written for one replica and communicates with
the others by collectives. The axes inside a replica are *automatic*: XLA splits the work along
them according to the shardings of the variables.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpudist.options import shorten
from tpudist.xla.devices import slice_index
from tpudist.xla.ordered_sums import Block

REPLICA_AXIS = "replica"
# Axes inside a replica that split its batch (and may split other arrays), coarsest first: stages
# divide the batch before other axes do, and experts exchange rows with their neighbors.
BATCH_AXES = ("stage", "data", "fsdp", "expert")


@dataclasses.dataclass(frozen=True)
class ReplicaMesh:
    """A mesh whose first axis, `replica`, counts replicas; the other axes are inside a replica.

    Attributes:
        mesh: The mesh of devices.
        replica_axis: Name of its axis of replicas.
        axis_name: Second name of that axis for replica functions.
        deterministic: Number of replicas, named like the option of the strategies, which does not
            depend on the number of devices: each device has several, in order. None for one replica
            per position of the axis.
    """

    mesh: Mesh
    replica_axis: str = REPLICA_AXIS
    axis_name: str | None = None
    deterministic: int | None = None

    def __post_init__(self):
        """Checks the name of the axis and the number of replicas."""
        _check_axis_name(self.axis_name, self.inner_axes)
        if self.deterministic is not None:
            _check_deterministic(self.deterministic, self.mesh, self.inner_axes)
        if self.axis_name == self.replica_axis:
            object.__setattr__(self, "axis_name", None)

    @functools.cached_property
    def num_replicas(self) -> int:
        """Number of replicas, over all processes."""
        return self.deterministic or self.mesh.shape[self.replica_axis]

    def with_more_replicas(self, factor: int) -> "ReplicaMesh":
        """Returns a mesh of `factor` times as many replicas, for traces only.

        Warnings compare a trace with one of more replicas (`run/trace_warnings.py`). The mesh has
        each device several times, so no program can be compiled for it.
        """
        if self.deterministic is not None:
            return dataclasses.replace(self, deterministic=self.deterministic * factor)
        mesh = self.mesh
        axis = mesh.axis_names.index(self.replica_axis)
        devices = np.concatenate([mesh.devices] * factor, axis=axis)
        larger = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        return dataclasses.replace(self, mesh=larger)

    @functools.cached_property
    def block(self) -> Block | None:
        """The replicas that share a device; None if each has devices of its own."""
        if self.deterministic is None:
            return None
        num_devices = self.mesh.shape[self.replica_axis]
        return Block(self.replica_axis, num_devices, self.deterministic // num_devices)

    @functools.cached_property
    def replica_devices(self) -> np.ndarray:
        """The devices `[num_replicas, devices_per_replica]`; replicas may share devices."""
        groups = self.mesh.devices.reshape(self.mesh.shape[self.replica_axis], -1)
        return np.repeat(groups, self.num_replicas // len(groups), axis=0)

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """Names of the axes inside a replica."""
        return tuple(str(name) for name in self.mesh.axis_names if name != self.replica_axis)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes inside a replica over which its rows are split."""
        return tuple(name for name in BATCH_AXES if name in self.inner_axes)

    def devices_of(self, replica: int) -> list[jax.Device]:
        """Returns the devices of one replica."""
        return list(self.replica_devices[replica])

    @property
    def devices_per_replica(self) -> int:
        """Number of devices that one replica spans."""
        return self.mesh.size // self.mesh.shape[self.replica_axis]

    @property
    def manual_axes(self) -> frozenset[str]:
        """The axes that are manual in a replica function."""
        # All axes if a replica is one device: XLA:CPU aborts on 16-bit collectives in functions
        # that are manual only over some axes, even if the other axes have one device.
        if self.devices_per_replica == 1:
            return frozenset(str(name) for name in self.mesh.axis_names)
        return frozenset({self.replica_axis})

    @functools.cached_property
    def local_replicas(self) -> tuple[int, ...]:
        """The replicas that have a device in this process, in order."""
        return tuple(self.replicas_of_processes.get(jax.process_index(), ()))

    @functools.cached_property
    def replicas_of_processes(self) -> dict[int, list[int]]:
        """The replicas that have a device in each process, in order."""
        found: dict[int, list[int]] = {}
        for i, row in enumerate(self.replica_devices):
            for process in dict.fromkeys(d.process_index for d in row):
                found.setdefault(process, []).append(i)
        return found

    @functools.cached_property
    def num_processes(self) -> int:
        """Number of processes that have a device in this mesh."""
        return len(self.processes)

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """The processes that have a device in this mesh, in order."""
        return tuple(sorted({d.process_index for d in self.mesh.devices.flat}))

    @functools.cached_property
    def platform(self) -> str:
        """Platform of the devices: `cpu`, `gpu` or `tpu`."""
        return self.mesh.devices.flat[0].platform

    @functools.cached_property
    def device_set(self) -> frozenset[jax.Device]:
        """The devices of the mesh."""
        return frozenset(self.mesh.devices.flat)

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """Sharding of an array that is complete on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def stacked(self) -> NamedSharding:
        """Sharding of an array `[num_replicas, ...]` with one part per replica."""
        return NamedSharding(self.mesh, PartitionSpec(self.replica_axis))

    def has_whole(self, value: object) -> bool:
        """Whether `value` is a global array on this mesh that is not split over replicas."""
        # `value` is any leaf; arrays of several classes have a `sharding`.
        sharding = getattr(value, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return False
        return self.replica_axis not in _axes_of(sharding.spec)


def mesh_of_mirrored(array: jax.Array, *, of_several: bool = True) -> Mesh | None:
    """Returns the mesh of replicas on which `array` is mirrored; None if it is not mirrored.

    An array on a mesh that is not split over the replica axis has the same value on all replicas.

    Args:
        array: Any concrete array.
        of_several: Whether a mesh with one position along the replica axis does not count, because
            it has one replica. Pass False if replicas share devices (`ReplicaMesh.block`).
    """
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or REPLICA_AXIS not in sharding.mesh.shape:
        return None
    assert isinstance(sharding.mesh, Mesh)  # the mesh of a concrete array is not abstract
    if sharding.mesh.shape[REPLICA_AXIS] == 1:
        return None if of_several else sharding.mesh
    return sharding.mesh if REPLICA_AXIS not in _axes_of(sharding.spec) else None


def _axes_of(spec: PartitionSpec) -> set[str]:
    """Returns all axes that split a dim."""
    return set(jax.tree.leaves(tuple(spec)))  # an entry is None, a name, or a tuple of names


def make_mesh(
    devices: Sequence[jax.Device],
    inner_axes: Mapping[str, int] | None = None,
    *,
    in_order: bool = False,
    axis_name: str | None = None,
    deterministic: int | None = None,
) -> ReplicaMesh:
    """Creates a mesh of as many replicas as `devices` allow, each of `inner_axes` devices.

    On TPUs, the axes follow the torus. With several slices, only replicas are split over the slow
    network, and the inner axes stay inside a slice. If there are fewer replicas than slices, the
    axis `data` is split over it too, because it communicates once per step like replicas.

    Args:
        devices: The devices, without repetition.
        inner_axes: Sizes of the axes inside a replica by name, in the order of the mesh (but
            `stage` comes first); empty for one device per replica.
        in_order: Whether to use the order of `devices`, replica by replica, instead.
        axis_name: Second name of the replica axis for replica functions.
        deterministic: Number of replicas that does not depend on the number of devices; see
            `ReplicaMesh`.

    Raises:
        ValueError: If there are no devices, a device repeats, an axis is invalid, the devices
            cannot be divided into such replicas, or an axis would span slices.
        TypeError: If `inner_axes` is not a dict.
    """
    inner_axes = _as_axes(inner_axes)
    if "stage" in inner_axes:
        # The stages of a pipeline run functions that are manual over other axes. Since jaxlib 0.12
        # XLA ends the process unless axes become manual in the order of the mesh.
        inner_axes = {"stage": inner_axes.pop("stage"), **inner_axes}
    _check_axes(devices, inner_axes)
    num_replicas = len(devices) // math.prod(inner_axes.values())
    shape = (num_replicas, *inner_axes.values())
    names = (REPLICA_AXIS, *inner_axes)
    axes = dict(zip(names, shape, strict=True))
    grid = _arrange_row_by_row(devices, shape) if in_order else _arrange(devices, axes)
    # Explicit axes, JAX's default, break ordinary models; meshes with both kinds lose shardings.
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    return ReplicaMesh(mesh, axis_name=axis_name, deterministic=deterministic)


def _check_deterministic(replicas: int, mesh: Mesh, inner_axes: Sequence[str]) -> None:
    problem = f"deterministic={replicas!r} is not supported"
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"{problem}. It must be a number of replicas: 1, 2, 4, 8 ...")
    if replicas & (replicas - 1):
        fits = 1 << replicas.bit_length()
        raise ValueError(
            f"{problem}: it must be a power of two, because sums are added in pairs, and pairs of "
            f"those. Use {fits // 2} or {fits}."
        )
    if any(mesh.shape[axis] > 1 for axis in inner_axes):
        axes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in inner_axes)
        raise ValueError(
            f"{problem} with replicas that span devices ({axes}): XLA chooses how to sum inside "
            "such a replica, and may choose differently on another mesh. Omit one of them."
        )
    if replicas % mesh.size:
        raise ValueError(
            f"{problem} on {mesh.size} device(s), which cannot all have the same number of "
            f"replicas. Use a number of devices that divides it: 1, 2, 4 ... up to {replicas}; or "
            "another number of replicas."
        )


def _check_axis_name(name: str | None, inner_axes: Sequence[str]) -> None:
    if name is None or (isinstance(name, str) and name and name not in inner_axes):
        return
    axes = ", ".join(map(repr, inner_axes)) or "none"
    raise ValueError(
        f"axis_name={shorten(name)} is not supported. It must be a string such as 'batch' (a "
        "second name of the axis of replicas, as for jax.pmap), and not an axis inside a replica "
        f"(these are: {axes}). Omit it to call the axis only '{REPLICA_AXIS}'."
    )


def _as_axes(axes: Mapping[str, int] | None) -> dict[str, int]:
    """Copies the axes into a dict. The error for a text such as `"fsdp=4"` suggests the dict."""
    with contextlib.suppress(TypeError, ValueError):
        return dict(axes or {})
    meant = dict(re.findall(r"([a-zA-Z_]\w*)['\"]?\s*[=:,]\s*(\d+)", str(axes)))
    written = ", ".join(f'"{name}": {size}' for name, size in meant.items()) or '"fsdp": 4'
    raise TypeError(  # the strategies call this argument `replica_axes`
        f"replica_axes={axes!r} is of type {type(axes).__name__}. It must be a dict from the names "
        f"of the axes inside a replica to their sizes: replica_axes={{{written}}}."
    )


def _check_axes(devices: Sequence[jax.Device], inner_axes: Mapping[str, int]) -> None:
    if not devices:
        raise ValueError("The mesh has no devices. Name at least one device.")
    if len(set(devices)) != len(devices):
        repeated = next(d for d in devices if list(devices).count(d) > 1)
        raise ValueError(
            f"Device {repeated} is named more than once. Use a different device for each replica."
        )
    for name, size in inner_axes.items():
        if name == REPLICA_AXIS or not isinstance(name, str) or not name.isidentifier():
            raise ValueError(
                f"An axis inside a replica is named {shorten(name)}. Use an identifier other than "
                f"'{REPLICA_AXIS}', such as 'fsdp' or 'tensor'."
            )
        if not isinstance(size, int) or size < 1:
            raise ValueError(
                f"Axis '{name}' has size {shorten(size)}. The size must be an integer of at least "
                "1."
            )
    per_replica = math.prod(inner_axes.values())
    if len(devices) % per_replica:
        axes = ", ".join(f"{name}={size}" for name, size in inner_axes.items())
        raise ValueError(
            f"Replicas of {axes} span {per_replica} devices each, but there are {len(devices)} "
            f"devices, which is not a multiple. Choose axes whose product divides {len(devices)}."
        )


def _arrange_row_by_row(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(devices, dtype=object).reshape(shape)


def _arrange(devices: Sequence[jax.Device], axes: Mapping[str, int]) -> np.ndarray:
    shape = tuple(axes.values())
    if devices[0].platform != "tpu":
        return _arrange_row_by_row(devices, shape)
    across = _slices_per_axis(axes, len(set(map(slice_index, devices))))
    return _arrange_across(devices, shape, across)


def arrange_slices(devices: Sequence[jax.Device], shape: Sequence[int]) -> np.ndarray:
    """Returns the devices of one or more slices in this shape; its first dims span the slices."""
    across, left = [], len(set(map(slice_index, devices)))
    # It ends with 1: slices have equally many devices, so their number divides the product.
    for size in shape:
        across.append(math.gcd(size, left))
        left //= across[-1]
    assert left == 1, (shape, left)
    return _arrange_across(devices, shape, across)


def _arrange_across(
    devices: Sequence[jax.Device], shape: Sequence[int], across: Sequence[int]
) -> np.ndarray:
    if math.prod(across) == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    within = [size // slices for size, slices in zip(shape, across, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )


def _slices_per_axis(axes: Mapping[str, int], num_slices: int) -> tuple[int, ...]:
    """Returns the number of slices that each axis spans: replicas first, then `data`, no other."""
    across, left = [], num_slices
    # Each axis spans as many slices as divide both its size and the number of slices left.
    for name, size in axes.items():
        across.append(math.gcd(size, left) if name in (REPLICA_AXIS, "data") else 1)
        left //= across[-1]
    if left > 1:
        inner = {name: size for name, size in axes.items() if name != REPLICA_AXIS}
        sizes = ", ".join(f"{name}={size}" for name, size in inner.items())
        per_slice = math.prod(axes.values()) // num_slices
        raise ValueError(
            f"Replicas of {sizes} span {math.prod(inner.values())} devices each, but a slice has "
            f"{per_slice}, and there are {num_slices} slices. Some replica would span slices, and "
            "its devices would communicate over the slow network in every layer. Choose axes whose "
            f"product divides {per_slice}, or add an axis named data, whose size is a multiple of "
            f"{left}, to span slices: it communicates once per step, as replicas do."
        )
    return tuple(across)
