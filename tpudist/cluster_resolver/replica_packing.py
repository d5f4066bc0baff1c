"""Packs replicas of one shape into a mesh of cores, in TensorFlow's order.

Pure arithmetic. Results are coordinates, int32 `[replicas, cores of a replica, 4]`, and coordinates
are `(x, y, z, core)`: the place of a chip, and the core on the chip.
"""

import math
from collections.abc import Sequence

import numpy as np

from tpudist.cluster_resolver.tpu_topology import Topology


def assign_in_task_order(
    topology: Topology, shape: np.ndarray, stride: np.ndarray, num_replicas: int
) -> np.ndarray:
    """Gives each replica consecutive devices, for a mesh in which devices are missing."""
    per_replica = math.prod(shape.tolist())
    # Consecutive devices of one task are on one host, so a replica spans as few hosts as possible.
    devices = topology.device_coordinates.reshape(-1, topology.mesh_rank)
    if (stride != 1).any() or num_replicas * per_replica > len(devices):
        raise ValueError(
            f"{num_replicas} replica(s) of {per_replica} core(s) with computation_stride {stride} "
            f"need more devices: the mesh {topology.mesh_shape} has only {len(devices)} of them. "
            f"Use fewer replicas, without a stride."
        )
    return devices[: num_replicas * per_replica].reshape(num_replicas, per_replica, -1)


def pack(counts: Sequence[int], num_replicas: int) -> list[int]:
    """Returns the number of replicas along each axis: a block that is nearly a cube.

    Args:
        counts: Numbers of replicas that fit along each axis; their product is at least
            `num_replicas`.
        num_replicas: Number of replicas.
    """
    packed = [0] * len(counts)
    if num_replicas <= 0:
        return packed
    remaining, dims = num_replicas, len(counts)
    # The axis with the least places first, so that the others can take the rest; among equals the
    # cores of a chip, then x, y, z.
    order = sorted(range(len(counts)), key=lambda i: (counts[i], (i + 1) % len(counts)))
    for axis in order:
        # The root is in floating point, as in TensorFlow, so that both round in the same way.
        packed[axis] = min(math.ceil(remaining ** (1.0 / dims)), counts[axis])
        remaining = -(-remaining // packed[axis])
        # `remaining` is rounded up, so the product of `packed` is at least `num_replicas`; a grid
        # leaves the last places empty. The last axis has dims == 1 and takes all that remain.
        dims -= 1
    return packed


def assign_grid(
    shape: np.ndarray, stride: np.ndarray, packed: Sequence[int], num_replicas: int
) -> np.ndarray:
    """Places replicas side by side: along the cores of a chip first, then along x, y, z."""
    cores_first = [packed[-1], *packed[:-1]]
    offsets = []
    for replica in range(num_replicas):
        position = []
        for size in cores_first:
            position.append(replica % size)
            replica //= size
        place = np.asarray([*position[1:], position[0]], np.int32)
        # A stride of s leaves gaps between the cores of a replica, which s replicas share: they are
        # interleaved in one footprint of `shape * stride`. Then comes the next footprint.
        offsets.append(place // stride * (shape * stride) + place % stride)
    within = np.indices(shape.tolist()).reshape(len(shape), -1).T * stride
    return np.asarray(offsets, np.int32).reshape(-1, 1, len(shape)) + within


def assign_rings(shape: Sequence[int], packed: Sequence[int]) -> np.ndarray:
    """Places replicas along a ring over the torus, and the chips of each along a smaller ring."""
    within = np.asarray(_ring(*shape[:3]))
    # Neighbors on the outer ring are adjacent blocks, and neighbors on the inner ring adjacent
    # chips.
    rings = [np.asarray(chip) * shape[:3] + within for chip in _ring(*packed[:3])]
    cores = shape[3]
    chips = np.repeat(np.asarray(rings), cores, axis=1)  # [replica, core, 3]
    core = np.tile(np.arange(cores), len(within))
    return np.concatenate([chips, np.broadcast_to(core[:, None], (*chips.shape[:2], 1))], axis=-1)


def _ring(x: int, y: int, z: int) -> list[tuple[int, int, int]]:
    """Returns the chips of a block as a ring: neighbors in the list, and its ends, are adjacent.

    If a side is odd, or only one is longer than 1, returns the chips row by row.
    """
    sides = (x, y, z)
    # A ring alternates between the two colors of a chessboard, so it needs an even number of chips.
    # The construction below needs every side to be even.
    if sum(side > 1 for side in sides) < 2 or any(side > 1 and side % 2 for side in sides):
        return [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    if z == 1:
        return [(0, 0, 0), *((i, j, 0) for i, j in _open_ring(x, y))]
    if y == 1:
        return [(0, 0, 0), *((i, 0, k) for i, k in _open_ring(x, z))]
    if x == 1:
        return [(0, 0, 0), *((0, j, k) for j, k in _open_ring(y, z))]
    chips = [(0, 0, 0)]
    # Each layer is a ring without its first chip, forward and backward in turn, so that the end of
    # one is above the start of the next. The first chips of all layers are the way back.
    for k in range(z):
        layer = _open_ring(x, y)
        chips += [(i, j, k) for i, j in (layer if k % 2 == 0 else reversed(layer))]
    return [*chips, *((0, 0, k) for k in range(z - 1, 0, -1))]


def _open_ring(x: int, y: int) -> list[tuple[int, int]]:
    """Returns a ring over a layer without its first chip: rows forth and back, then the return."""
    chips = []
    for j in range(0, y, 2):
        chips += [(i, j) for i in range(1, x)]
        chips += [(i, j + 1) for i in range(x - 1, 0, -1)]
    return chips + [(0, j) for j in range(y - 1, 0, -1)]
