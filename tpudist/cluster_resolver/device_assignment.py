"""DeviceAssignment: which cores of a slice belong to which replica.

A *computation* is what one replica spans: a block of cores of `computation_shape`, whose cores are
`computation_stride` apart. `DeviceAssignment.build` packs replicas of that shape into the mesh, in
the order in which TensorFlow does: as rings along the torus where that can be, else as a grid.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpudist.cluster_resolver.tpu_topology import Topology


class DeviceOrderMode(enum.IntEnum):
    """In which order cores are taken. As `tf.tpu.experimental.DeviceOrderMode`.

    Attributes:
        AUTO: As rings if the replicas fill the mesh, else as a grid.
        RING: As rings.
        MESH: As a grid.
    """

    AUTO = 0
    RING = 1
    MESH = 2


class DeviceAssignment:
    """The coordinates of each core of each replica; see `TPUStrategy`.

    As `tf.tpu.experimental.DeviceAssignment`.
    """

    def __init__(self, topology: Topology, core_assignment: Any):
        """An assignment as given; `DeviceAssignment.build` finds one.

        Args:
            topology: The slice.
            core_assignment: Coordinates of each core, `[replicas, cores of a replica, 4]`.

        Raises:
            ValueError: Another type or shape, or coordinates without a device.
        """
        _check_topology(topology)
        core_assignment = np.asarray(core_assignment, dtype=np.int32)
        if core_assignment.ndim != 3:
            raise ValueError(
                f"core_assignment must be a rank 3 array [replicas, cores of a replica, "
                f"coordinates], got shape {core_assignment.shape}."
            )
        if core_assignment.shape[-1] != topology.mesh_rank:
            raise ValueError(
                f"core_assignment.shape[-1] must have size equal to topology rank "
                f"({topology.mesh_rank}), got core_assignment.shape={core_assignment.shape}."
            )
        self._topology, self._core_assignment = topology, core_assignment
        self._replicas: dict[tuple[int, int], list[int]] = {}
        for replica, cores in enumerate(core_assignment):
            for logical_core, coordinates in enumerate(cores):
                task = topology.task_ordinal_at_coordinates(coordinates)
                self._replicas.setdefault((task, logical_core), []).append(replica)

    @property
    def topology(self) -> Topology:
        """The slice."""
        return self._topology

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self._core_assignment.shape[0]

    @property
    def num_cores_per_replica(self) -> int:
        """Number of cores that one replica spans: its logical devices."""
        return self._core_assignment.shape[1]

    @property
    def core_assignment(self) -> np.ndarray:
        """Coordinates of each core, int32 `[replicas, cores of a replica, 4]`."""
        return self._core_assignment

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """The coordinates of one core of one replica."""
        return tuple(self._core_assignment[replica, logical_core, :].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """The replicas whose core `logical_core` is in this task, in order.

        Raises:
            ValueError: There are none.
        """
        try:
            return self._replicas[task_id, logical_core]
        except KeyError:
            raise ValueError(
                f"Can not find any replica in task: {task_id} contains logical_core: "
                f"{logical_core}. There are {self._topology.num_tasks} task(s), and "
                f"{self.num_cores_per_replica} core(s) in each of {self.num_replicas} replica(s)."
            ) from None

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """The number within its task of the device of a core."""
        at = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(at)

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """TensorFlow's name for the host of a core, such as `/task:0/device:CPU:0`."""
        at = self.coordinates(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(at, job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """TensorFlow's name for the device of a core, such as `/task:0/device:TPU:3`."""
        at = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_name_at_coordinates(at, job)

    @classmethod
    def build(
        cls,
        topology: Topology | bytes,
        computation_shape: Any = None,
        computation_stride: Any = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> "DeviceAssignment":
        """Packs `num_replicas` replicas of one shape into a slice.

        Args:
            topology: The slice; also as `Topology.serialized` gives it.
            computation_shape: Cores of a replica along x, y, z, and on a chip; by default one.
            computation_stride: How far its cores are apart, alike; by default next to each other.
            num_replicas: How many.
            device_order_mode: In which order cores are taken.

        Raises:
            ValueError: A shape or stride that is not four positive numbers, a replica larger than
                the mesh, more replicas than fit, or rings that cannot be.
        """
        topology = Topology(serialized=topology) if isinstance(topology, bytes) else topology
        _check_topology(topology)
        shape = _check_sizes("computation_shape", computation_shape, topology.mesh_rank)
        stride = _check_sizes("computation_stride", computation_stride, topology.mesh_rank)
        mesh_shape = topology.mesh_shape
        footprint = shape * stride
        if (footprint > mesh_shape).any():
            raise ValueError(
                f"computation footprint {footprint} does not fit in TPU topology shape "
                f"{mesh_shape}. Its axes are x, y, z and the cores of a chip."
            )
        counts = mesh_shape // footprint * stride
        most = math.prod(counts.tolist())
        if num_replicas > most:
            raise ValueError(
                f"requested {num_replicas} replicas but only {most} replicas with shape {shape} "
                f"and computation_stride {stride} fit in a TPU mesh of shape {mesh_shape}."
            )
        if len(topology.missing_devices):
            return cls(topology, _assign_in_task_order(topology, shape, stride, num_replicas))
        packed = _pack(counts.tolist(), num_replicas)
        fills = shape[-1] == mesh_shape[-1] and (stride == 1).all() and num_replicas == most
        if device_order_mode == DeviceOrderMode.RING and not fills:
            raise ValueError(
                "device_order_mode=DeviceOrderMode.RING is not compatible with these replicas: a "
                "ring needs replicas that fill the mesh and its chips, without a stride. Try "
                "device_order_mode=DeviceOrderMode.AUTO."
            )
        if fills and device_order_mode != DeviceOrderMode.MESH:
            return cls(topology, _rings(shape.tolist(), packed))
        return cls(topology, _grid(shape, stride, packed, num_replicas))


def _check_topology(topology: Any) -> None:
    if not isinstance(topology, Topology):
        raise ValueError(
            f"`topology` is not a Topology object; got {type(topology).__name__}. Create one with "
            f"tpudist.experimental.Topology.of(jax.devices())."
        )


def _check_sizes(what: str, sizes: Any, rank: int) -> np.ndarray:
    array = np.asarray([1] * rank if sizes is None else sizes, dtype=np.int32)
    if array.shape != (rank,):
        raise ValueError(f"{what} must have shape [{rank}], got {sizes!r} of shape {array.shape}.")
    if (array < 1).any():
        raise ValueError(f"{what} must be positive; got {what}={sizes!r}.")
    return array


def _assign_in_task_order(
    topology: Topology, shape: np.ndarray, stride: np.ndarray, num_replicas: int
) -> np.ndarray:
    """Consecutive devices for each replica: what is left of a mesh with holes in it."""
    per_replica = math.prod(shape.tolist())
    devices = topology.device_coordinates.reshape(-1, topology.mesh_rank)
    if (stride != 1).any() or num_replicas * per_replica > len(devices):
        raise ValueError(
            f"{num_replicas} replica(s) of {per_replica} core(s) with computation_stride {stride} "
            f"need more devices: the mesh {topology.mesh_shape} has only {len(devices)} of them. "
            f"Use fewer replicas, without a stride."
        )
    return devices[: num_replicas * per_replica].reshape(num_replicas, per_replica, -1)


def _pack(counts: Sequence[int], num_replicas: int) -> list[int]:
    """How many replicas along each axis: nearly a cube, and both cores of a chip first."""
    packed = [0] * len(counts)
    remaining, dims = num_replicas, len(counts)
    # The most constrained axis first; among equals the cores of a chip, then x, y, z.
    order = sorted(range(len(counts)), key=lambda i: (counts[i], (i + 1) % len(counts)))
    for axis in order if num_replicas > 0 else ():
        # The root in floating point, as TensorFlow takes it, so that both round alike.
        packed[axis] = min(math.ceil(remaining ** (1.0 / dims)), counts[axis])
        remaining = -(-remaining // packed[axis])
        dims -= 1
    return packed


def _grid(
    shape: np.ndarray, stride: np.ndarray, packed: Sequence[int], num_replicas: int
) -> np.ndarray:
    """Replicas side by side: the cores of a chip first, then x, y, z."""
    cores_first = [packed[-1], *packed[:-1]]
    offsets = []
    for replica in range(num_replicas):
        position = []
        for size in cores_first:
            position.append(replica % size)
            replica //= size
        place = np.asarray([*position[1:], position[0]], np.int32)
        # As many replicas as the stride lie interleaved in one footprint; then comes the next.
        offsets.append(place // stride * (shape * stride) + place % stride)
    within = np.indices(shape.tolist()).reshape(len(shape), -1).T * stride
    return np.asarray(offsets, np.int32).reshape(-1, 1, len(shape)) + within


def _rings(shape: Sequence[int], packed: Sequence[int]) -> np.ndarray:
    """Replicas along a ring over the torus, and the chips of each along a ring of its own."""
    within = np.asarray(_ring(*shape[:3]))
    rings = [np.asarray(chip) * shape[:3] + within for chip in _ring(*packed[:3])]
    cores = shape[3]
    chips = np.repeat(np.asarray(rings), cores, axis=1)  # [replica, core, 3]
    core = np.tile(np.arange(cores), len(within))
    return np.concatenate([chips, np.broadcast_to(core[:, None], (*chips.shape[:2], 1))], axis=-1)


def _ring(x: int, y: int, z: int) -> list[tuple[int, int, int]]:
    """The chips of a block in an order in which neighbours, the ends too, are next to each other.

    Where there is none, or with an odd side, rows one after the other.
    """
    sides = (x, y, z)
    if sum(side > 1 for side in sides) < 2 or any(side > 1 and side % 2 for side in sides):
        return [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    if z == 1:
        return [(0, 0, 0), *((i, j, 0) for i, j in _open_ring(x, y))]
    if y == 1:
        return [(0, 0, 0), *((i, 0, k) for i, k in _open_ring(x, z))]
    if x == 1:
        return [(0, 0, 0), *((0, j, k) for j, k in _open_ring(y, z))]
    chips = [(0, 0, 0)]
    for k in range(z):  # layer by layer to and fro, then back along the corner left free
        layer = _open_ring(x, y)
        chips += [(i, j, k) for i, j in (layer if k % 2 == 0 else reversed(layer))]
    return [*chips, *((0, 0, k) for k in range(z - 1, 0, -1))]


def _open_ring(x: int, y: int) -> list[tuple[int, int]]:
    """A ring over a layer without its first chip: along the rows to and fro, then back."""
    chips = []
    for j in range(0, y, 2):
        chips += [(i, j) for i in range(1, x)]
        chips += [(i, j + 1) for i in range(x - 1, 0, -1)]
    return chips + [(0, j) for j in range(y - 1, 0, -1)]
