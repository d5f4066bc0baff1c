"""Topology: the coordinates of a slice's devices on its torus.

A core's coordinates are `(x, y, z, core)`: the chip's place on the torus, and the core on the chip.
A *task* is one process, on one host; its devices are numbered from 0 within it.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.typing import ArrayLike

from tpudist.cluster_resolver import tpu_topology_proto
from tpudist.cluster_resolver.tpu_topology_proto import RANK as _RANK
from tpudist.options.member_names import format_values


class Topology:
    """The shape of a slice, and the coordinates of each task's devices.

    `Topology.of(devices)` creates one from JAX devices. Mirrors `tf.tpu.experimental.Topology`,
    and `serialized` is the same protocol buffer (`tensorflow.tpu.TopologyProto`).

    Args:
        serialized: Result of `Topology.serialized`; the other arguments are then ignored.
        mesh_shape: Four sizes, `(x, y, z, cores per chip)`.
        device_coordinates: Coordinates of each device, `[tasks, devices of a task, 4]`.

    Raises:
        ValueError: If `serialized` is not a topology, `mesh_shape` is not four positive sizes, or
            coordinates have another shape, are outside of the mesh or occur twice.
    """

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: ArrayLike | Sequence[int] | None = None,
        device_coordinates: ArrayLike | Sequence | None = None,
    ):
        if serialized:  # b"" is not a topology, and counts as omitted
            mesh_shape, device_coordinates, _ = tpu_topology_proto.parse(serialized)
        self._mesh_shape = _as_ints(mesh_shape)
        self._device_coordinates = _as_ints(device_coordinates)
        if self._mesh_shape.shape != (_RANK,) or (self._mesh_shape < 1).any():
            raise ValueError(
                f"`mesh_shape` must be a sequence of 4 positive entries (x, y, z, cores per chip), "
                f"got {mesh_shape!r}. Topology.of(jax.devices()) finds it."
            )
        if self._device_coordinates.ndim != 3 or self._device_coordinates.shape[2] != _RANK:
            raise ValueError(
                f"`device_coordinates` must be a rank 3 array [tasks, devices of a task, 4], got "
                f"shape {self._device_coordinates.shape}."
            )
        # Coordinates -> task, and number of the device in it.
        self._device_at = self._index_by_coordinates()

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> "Topology":
        """Returns the topology of JAX devices.

        TPU devices have coordinates; the lowest become zero. Other devices, such as emulated ones,
        are laid out like a slice with two cores per chip (one if the number of devices is odd). The
        chips form a rectangle as close to a square as possible, and devices are numbered along
        cores first, then x, then y. So 8 devices have the mesh shape `(2, 2, 1, 2)`.

        Raises:
            ValueError: If the devices belong to several slices, or their number differs between
                processes.
        """
        tasks = group_by_task(devices)
        sizes = {len(task) for task in tasks}
        if len(sizes) != 1:
            found = format_values("task", {i: len(task) for i, task in enumerate(tasks)})
            raise ValueError(
                f"Every task of a topology must have the same number of devices, but of these "
                f"{len(devices)} devices the processes have different numbers ({found}). Use the "
                f"same number of each process."
            )
        num_slices = count_slices(devices)
        if num_slices > 1:
            raise ValueError(
                f"A topology belongs to one slice, but these {len(devices)} devices belong to "
                f"{num_slices} slices. Use TPUStrategy(replica_axes=...), which keeps each "
                f"replica in a slice."
            )
        ordered = [d for task in tasks for d in task]
        # Only JAX's TPU devices have coordinates.
        coordinates = (
            _read_coordinates(ordered)
            if hasattr(ordered[0], "coords")
            else _make_coordinates(len(ordered))
        )
        # The devices may be a part of a slice, whose coordinates do not begin at zero.
        coordinates -= coordinates.min(axis=0)
        shape = coordinates.max(axis=0) + 1
        return cls(None, shape, coordinates.reshape(len(tasks), -1, _RANK))

    @property
    def mesh_shape(self) -> np.ndarray:
        """Shape of the mesh, int32 `[4]`: x, y, z, cores per chip."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """Number of dimensions: 4."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> np.ndarray:
        """Coordinates of each task's devices, int32 `[tasks, devices of a task, 4]`."""
        return self._device_coordinates

    @property
    def missing_devices(self) -> np.ndarray:
        """Coordinates in the mesh that have no device, `[number, 4]`."""
        has_device = np.zeros(self._mesh_shape, bool)
        has_device[tuple(self._device_coordinates.reshape(-1, _RANK).T)] = True
        return np.argwhere(~has_device)

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return self._device_coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """Number of devices in each task."""
        return self._device_coordinates.shape[1]

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the task of the device at these coordinates.

        Raises:
            ValueError: If no device has them.
        """
        return self._find(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the number, within its task, of the device at these coordinates.

        Raises:
            ValueError: If no device has them.
        """
        return self._find(device_coordinates)[1]

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns TensorFlow's name for the host of the device at these coordinates."""
        return f"{_job(job)}/task:{self._find(device_coordinates)[0]}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns TensorFlow's name for the device at these coordinates."""
        task, device = self._find(device_coordinates)
        return f"{_job(job)}/task:{task}/device:TPU:{device}"

    def serialized(self) -> bytes:
        """Returns the topology as the protocol buffer `tensorflow.tpu.TopologyProto`."""
        return tpu_topology_proto.serialize(self._mesh_shape, self._device_coordinates)

    def _index_by_coordinates(self) -> dict[tuple[int, ...], tuple[int, int]]:
        places: dict[tuple[int, ...], tuple[int, int]] = {}
        for task, devices in enumerate(self._device_coordinates.tolist()):
            for device, coordinates in enumerate(devices):
                at = tuple(coordinates)
                # Each place has at most one device: assignments name devices only by these.
                inside = all(0 <= c < size for c, size in zip(at, self._mesh_shape, strict=True))
                if not inside or at in places:
                    raise ValueError(
                        f"Device {device} of task {task} is at {at}, which is "
                        f"{'given twice' if inside else 'outside of the mesh'} "
                        f"{tuple(self._mesh_shape.tolist())}. Give each device its own place."
                    )
                places[at] = task, device
        return places

    def _find(self, device_coordinates: Sequence[int]) -> tuple[int, int]:
        at = tuple(int(c) for c in device_coordinates)
        if at not in self._device_at:
            raise ValueError(
                f"No device is at {at} in a topology of shape {tuple(self._mesh_shape.tolist())} "
                f"with {len(self._device_at)} device(s)."
            )
        return self._device_at[at]


def group_by_task(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """Returns the devices of each process, ordered by process number."""
    processes = sorted({d.process_index for d in devices})
    return [[d for d in devices if d.process_index == process] for process in processes]


def count_slices(devices: Sequence[jax.Device]) -> int:
    """Returns the number of slices of devices; devices other than TPUs count as one."""
    # Only JAX's TPU devices have a slice, and only if there are several.
    return len({getattr(d, "slice_index", None) or 0 for d in devices})


def _read_coordinates(devices: Sequence[jax.Device]) -> np.ndarray:
    # Not every device that has coordinates reports a core.
    return np.asarray([[*d.coords, getattr(d, "core_on_chip", 0)] for d in devices], np.int32)


def _make_coordinates(number: int) -> np.ndarray:
    cores = 2 if number % 2 == 0 else 1
    chips = number // cores
    # The largest divisor up to the root, so the rectangle is as close to a square as possible.
    y = max(d for d in range(1, int(chips**0.5) + 1) if chips % d == 0)
    at = np.unravel_index(np.arange(number), (y, chips // y, cores))
    return np.stack([at[1], at[0], np.zeros(number, int), at[2]], axis=1).astype(np.int32)


def _as_ints(values: ArrayLike | Sequence | None) -> np.ndarray:
    return np.asarray([] if values is None else values, dtype=np.int32)


def _job(job: str | None) -> str:
    return "" if job is None else f"/job:{job}"
