"""Which links of a slice carry a collective, and how long it takes them.

The chips of a slice are a grid whose rows and columns may be closed to rings. The rules, after the
scaling book (jax-ml.github.io/scaling-book/sharding, "Our Third Primitive", and /tpus):

1. An all-gather or reduce-scatter of B bytes in all among n devices brings B (n - 1) / n bytes to
   each device. It arrives over all axes of the grid that the group spans, in both directions of
   each axis that is a ring of the group; at the end of a line only one link leads to the group.
2. An all-reduce is a reduce-scatter and an all-gather, at 0.64 of their bandwidth: the mean of what
   was measured of 606 MB on a v6e-256 (236 GB/s of 360: AI-Hypercomputer/tpu-recipes,
   microbenchmarks/trillium/collectives) and of 268 MB on a v5e-8 (57 GB/s of 90:
   AI-Hypercomputer/jetstream-pytorch, pull request 168).
3. An all-to-all of B bytes per device crosses the middle of the longest axis: on a ring of n, n B/4
   bytes through two links either way.
4. A permute takes the shortest way, axis by axis, and its most loaded link decides.
5. Groups that lie interleaved on an axis share its links, and so do the two devices of a chip where
   they belong to different groups. Within a chip, the devices talk at six times the speed of a link
   (docs.cloud.google.com/tpu/docs/tpu7x).
6. A hop takes 1 us (tpus, question 5), and a transfer the longer of its hops and its bytes. Half
   of a ring is the farthest way on it; on a line it is the whole line.

Against other published measurements: an all-gather over the 4 chips of a tpu7x:2x2x1, 268 MB in
all, took 2.25 ms and is priced 2.24 (accelerator-microbenchmarks, Ironwood/guides/collectives); a
reduce-scatter of 134 MB between two chips of a v2, 1.13 and 1.20 (scaling book, profiling); a
permute of 64 MiB to the neighbor on v5p, 0.78 and 0.75 (marin-community/marin, issue 6736).
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from tpudist.xla.hardware.chips import Chip

HOP_S = 1e-6
ALL_REDUCE_SHARE = 0.64
_WITHIN_CHIP = 6.0
# A direction of an axis of the grid, or the inside of a chip: what two transfers may compete for.
Link = tuple[int, int]
_INSIDE: Link = (-1, 0)


@dataclasses.dataclass(frozen=True)
class Route:
    """How one collective uses the links of a slice.

    Attributes:
        seconds: How long it takes on links that nothing else uses.
        busy_s: How long it keeps each link busy, by axis of the grid and direction (1 or -1).
    """

    seconds: float
    busy_s: Mapping[Link, float]


class Torus:
    """The chips of a mesh's devices, as a grid for each slice."""

    def __init__(self, mesh: Mesh, chip: Chip):
        """Reads the coordinates of the devices of `mesh`, chips of the kind `chip`."""
        self._chip = chip
        devices = list(mesh.devices.flat)
        coords = [tuple(device.coords) for device in devices]
        self._coords = np.array(coords).reshape(len(devices), -1)
        self._slices = np.array([getattr(device, "slice_index", 0) or 0 for device in devices])
        # The mesh may leave out chips of the slice: the slice is as large as its farthest chip.
        self._shape = tuple(int(size) + 1 for size in self._coords.max(axis=0))
        wrapped = chip.ring_axes(self._shape[: chip.torus_dims])
        self._wrapped = (*wrapped, *(False,) * (len(self._shape) - len(wrapped)))

    def crosses_slices(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether a group has devices of several slices."""
        return any(len({int(self._slices[i]) for i in group}) > 1 for group in groups)

    def route(self, kind: str, num_bytes: float, groups: tuple[tuple[int, ...], ...]) -> Route:
        """How a collective of a slice uses its links.

        Args:
            kind: The HLO opcode.
            num_bytes: Size of the whole operand or result on one device, the larger of the two.
            groups: The positions in the mesh of the devices that take part together.
        """
        if kind in ("collective-permute", "send"):
            return self._permute(num_bytes, groups)
        size = max((len(group) for group in groups), default=1)
        if size < 2:
            return Route(0.0, {})
        spans, per_chip = self._spans(groups)
        if not spans:
            rate = _WITHIN_CHIP * self._chip.ici_bytes_per_s
            seconds = bytes_received(kind, num_bytes, size) / rate
            return Route(seconds, {_INSIDE: seconds})
        bytes_per_s = self._chip.ici_bytes_per_s * per_chip / self._chip.devices_per_chip
        if kind in ("all-to-all", "ragged-all-to-all"):
            seconds = max(
                num_bytes * span.size * span.stride / (4 * span.directions) / bytes_per_s
                for span in spans
            )
        else:
            rate = bytes_per_s * sum(span.directions / span.stride for span in spans)
            rate *= ALL_REDUCE_SHARE if kind == "all-reduce" else 1
            seconds = bytes_received(kind, num_bytes, size) / rate
        hops = sum(span.hops for span in spans) * (2 if kind == "all-reduce" else 1)
        seconds = max(seconds, hops * HOP_S)
        return Route(seconds, {(span.axis, sign): seconds for span in spans for sign in (1, -1)})

    def _spans(self, groups: tuple[tuple[int, ...], ...]) -> tuple[list["_Span"], int]:
        return _spans(self, groups)

    def _permute(self, num_bytes: float, pairs: tuple[tuple[int, ...], ...]) -> Route:
        loads, hops, inside = _permute_loads(self, pairs)
        rate = self._chip.ici_bytes_per_s
        busy = {link: num_bytes * load / rate for link, load in loads}
        if inside:
            busy[_INSIDE] = num_bytes / (_WITHIN_CHIP * rate)
        if not busy:
            return Route(0.0, {})
        return Route(max(*busy.values(), hops * HOP_S), busy)


def bytes_received(kind: str, num_bytes: float, group_size: int) -> float:
    """What each device of a group receives, and sends, over the network, if no byte twice.

    An all-reduce counts twice: the parts to be summed, then the sums.
    """
    if kind in ("collective-permute", "collective-broadcast", "send"):
        return num_bytes
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * num_bytes * (group_size - 1) / group_size


@dataclasses.dataclass(frozen=True)
class _Span:
    """How far a group reaches along one axis of the grid.

    Attributes:
        axis: The axis of the grid.
        size: How many chips of the group stand in a row.
        stride: How far apart they are, and thus how many groups share the row's links.
        directions: 2 if the row is closed to a ring, 1 if it is a line.
    """

    axis: int
    size: int
    stride: int
    directions: int

    @property
    def hops(self) -> int:
        farthest = self.size // 2 if self.directions == 2 else self.size - 1
        return farthest * self.stride


@functools.lru_cache(maxsize=4096)
def _spans(torus: Torus, groups: tuple[tuple[int, ...], ...]) -> tuple[list[_Span], int]:
    """The axes that the first group spans (all are alike), and its devices per chip."""
    coords = torus._coords[list(groups[0])]
    num_chips = len(np.unique(coords, axis=0))
    spans = []
    for axis, length in enumerate(torus._shape):
        places = np.unique(coords[:, axis])
        if len(places) < 2:
            continue
        stride = int(np.diff(places).min())
        ring = torus._wrapped[axis] and len(places) * stride == length
        spans.append(_Span(axis, len(places), stride, 2 if ring else 1))
    return spans, len(groups[0]) // num_chips


@functools.lru_cache(maxsize=4096)
def _permute_loads(
    torus: Torus, pairs: tuple[tuple[int, ...], ...]
) -> tuple[tuple[tuple[Link, int], ...], int, bool]:
    """Per direction the transfers on its most loaded link; the most hops; any within a chip."""
    loads: dict[Link, dict[tuple[int, ...], int]] = defaultdict(lambda: defaultdict(int))
    coords, slices = torus._coords.tolist(), torus._slices.tolist()
    most_hops, inside = 0, False
    for source, target in pairs:
        place, hops = list(coords[source]), 0
        for axis, length in enumerate(torus._shape):
            distance = coords[target][axis] - place[axis]
            # The shorter way round. A link is known by the chip that it leaves, and its direction.
            if torus._wrapped[axis] and abs(distance) * 2 > length:
                distance -= int(math.copysign(length, distance))
            sign = 1 if distance > 0 else -1
            for _ in range(abs(distance)):
                loads[axis, sign][(slices[source], *place)] += 1
                place[axis] = (place[axis] + sign) % length
            hops += abs(distance)
        most_hops = max(most_hops, hops)
        inside |= source != target and hops == 0
    return tuple((link, max(at.values())) for link, at in loads.items()), most_hops, inside
