"""DeviceAssignment: the cores of a slice that belong to each replica.

A *computation* is the block of cores of one replica: of shape `computation_shape`, with a distance
of `computation_stride` between cores. `DeviceAssignment.build` packs replicas into the mesh in
TensorFlow's order: as rings along the torus if possible, else as a grid. `replica_packing` has the
arithmetic.
"""

import enum
import math
from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike

from tpudist.cluster_resolver import replica_packing
from tpudist.cluster_resolver.tpu_topology import Topology


class DeviceOrderMode(enum.IntEnum):
    """Order in which cores are assigned to replicas.

    Mirrors `tf.tpu.experimental.DeviceOrderMode`.

    Attributes:
        AUTO: Rings if the replicas fill the mesh, else a grid.
        RING: Rings.
        MESH: A grid.
    """

    AUTO = 0
    RING = 1
    MESH = 2


class DeviceAssignment:
    """The coordinates of each core of each replica; see `TPUStrategy`.

    `DeviceAssignment.build` computes one. Mirrors `tf.tpu.experimental.DeviceAssignment`.

    Args:
        topology: Topology of the slice.
        core_assignment: Coordinates of each core, `[replicas, cores of a replica, 4]`.

    Raises:
        ValueError: If a type or shape is wrong, or no device has one of the coordinates.
    """

    def __init__(self, topology: Topology, core_assignment: ArrayLike):
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
        # (task, logical core) -> replicas with that core in that task.
        self._replicas: dict[tuple[int, int], list[int]] = {}
        for replica, cores in enumerate(core_assignment):
            for logical_core, coordinates in enumerate(cores):
                task = topology.task_ordinal_at_coordinates(coordinates)
                self._replicas.setdefault((task, logical_core), []).append(replica)

    @property
    def topology(self) -> Topology:
        """Topology of the slice."""
        return self._topology

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self._core_assignment.shape[0]

    @property
    def num_cores_per_replica(self) -> int:
        """Number of cores of one replica, which are its logical devices."""
        return self._core_assignment.shape[1]

    @property
    def core_assignment(self) -> np.ndarray:
        """Coordinates of each core, int32 `[replicas, cores of a replica, 4]`."""
        return self._core_assignment

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Returns the coordinates of one core of one replica."""
        return tuple(self._core_assignment[replica, logical_core, :].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the replicas whose core `logical_core` is in a task, ascending.

        Raises:
            ValueError: If there are none.
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
        """Returns the number of a core's device within its task."""
        at = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(at)

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns TensorFlow's name for the host of a core, such as `/task:0/device:CPU:0`."""
        at = self.coordinates(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(at, job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Returns TensorFlow's name for the device of a core, such as `/task:0/device:TPU:3`."""
        at = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_name_at_coordinates(at, job)

    @classmethod
    def build(
        cls,
        topology: Topology | bytes,
        computation_shape: Sequence[int] | np.ndarray | None = None,
        computation_stride: Sequence[int] | np.ndarray | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> "DeviceAssignment":
        """Packs `num_replicas` replicas of one shape into a slice.

        Args:
            topology: Topology of the slice, or the result of `Topology.serialized`.
            computation_shape: Number of cores of a replica along x, y, z, and on a chip; by default
                one core.
            computation_stride: Distance between the cores of a replica along the same axes; by
                default 1.
            num_replicas: Number of replicas.
            device_order_mode: Order in which cores are assigned. If devices are missing in the
                mesh, neither order is possible, and replicas get consecutive devices.

        Raises:
            ValueError: If a shape or stride is not four positive numbers, a replica is larger than
                the mesh, not all replicas fit, or rings are impossible.
        """
        topology = Topology(serialized=topology) if isinstance(topology, bytes) else topology
        _check_topology(topology)
        shape = _check_sizes("computation_shape", computation_shape, topology.mesh_rank)
        stride = _check_sizes("computation_stride", computation_stride, topology.mesh_rank)
        counts = _count_places(topology.mesh_shape, shape, stride, num_replicas)
        # With holes in the mesh, neither a ring nor a grid has a device at every place.
        if len(topology.missing_devices):
            return cls(
                topology,
                replica_packing.assign_in_task_order(topology, shape, stride, num_replicas),
            )
        packed = replica_packing.pack(counts, num_replicas)
        # A ring passes through every chip once, so its replicas must tile the whole mesh without
        # gaps.
        tiles_mesh = (stride == 1).all() and num_replicas == math.prod(counts)
        can_form_rings = tiles_mesh and shape[-1] == topology.mesh_shape[-1]
        if device_order_mode == DeviceOrderMode.RING and not can_form_rings:
            raise ValueError(
                "device_order_mode=DeviceOrderMode.RING is not compatible with these replicas: a "
                "ring needs replicas that fill the mesh and its chips, without a stride. Try "
                "device_order_mode=DeviceOrderMode.AUTO."
            )
        if can_form_rings and device_order_mode != DeviceOrderMode.MESH:
            return cls(topology, replica_packing.assign_rings(shape.tolist(), packed))
        return cls(topology, replica_packing.assign_grid(shape, stride, packed, num_replicas))


def _check_topology(topology: object) -> None:
    if not isinstance(topology, Topology):
        raise ValueError(
            f"`topology` is not a Topology object; got {type(topology).__name__}. Create one with "
            f"tpudist.experimental.Topology.of(jax.devices())."
        )


def _count_places(
    mesh_shape: np.ndarray, shape: np.ndarray, stride: np.ndarray, num_replicas: int
) -> list[int]:
    """Returns the number of replicas that fit along each axis of the mesh."""
    # With a stride, a replica spans more cores than it has; the cores in the gaps belong to the
    # replicas that are interleaved with it. So a footprint contains `prod(stride)` replicas.
    footprint = shape * stride
    if (footprint > mesh_shape).any():
        raise ValueError(
            f"computation footprint {footprint} does not fit in TPU topology shape "
            f"{mesh_shape}. Its axes are x, y, z and the cores of a chip."
        )
    counts = (mesh_shape // footprint * stride).tolist()
    max_replicas = math.prod(counts)
    if num_replicas > max_replicas:
        raise ValueError(
            f"requested {num_replicas} replicas but only {max_replicas} replicas with shape "
            f"{shape} and computation_stride {stride} fit in a TPU mesh of shape {mesh_shape}."
        )
    return counts


def _check_sizes(name: str, sizes: Sequence[int] | np.ndarray | None, rank: int) -> np.ndarray:
    array = np.asarray([1] * rank if sizes is None else sizes, dtype=np.int32)
    if array.shape != (rank,):
        raise ValueError(f"{name} must have shape [{rank}], got {sizes!r} of shape {array.shape}.")
    if (array < 1).any():
        raise ValueError(f"{name} must be positive; got {name}={sizes!r}.")
    return array
