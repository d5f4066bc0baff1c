"""Estimates which links of a slice a collective uses, and for how long.

The chips of a slice are a grid whose rows and columns may be rings. The rules follow the scaling
book (jax-ml.github.io/scaling-book/sharding, "Our Third Primitive", and /tpus):

1. An all-gather or reduce-scatter of B bytes in total among n devices sends B (n - 1) / n bytes to
   each device. They arrive over all axes of the grid that the group spans, in both directions of
   each axis that is a ring of the group. At the end of a line only one link leads to the group.
2. An all-reduce is a reduce-scatter and an all-gather, at 0.64 of their bandwidth. This is the mean
   of two measurements: 606 MB on a v6e-256 (236 GB/s of 360: AI-Hypercomputer/tpu-recipes,
   microbenchmarks/trillium/collectives) and 268 MB on a v5e-8 (57 GB/s of 90:
   AI-Hypercomputer/jetstream-pytorch, pull request 168).
3. An all-to-all of B bytes per device is limited by the middle of the longest axis. Half of the
   bytes of one half of the devices must cross it: n B/4 in each direction, over two links on a ring
   of n and over one on a line.
4. A permute takes the shortest path, axis by axis, and its most loaded link determines the time.
5. Groups that are interleaved on an axis share its links. The two devices of a chip also share
   links if they are in different groups. Within a chip, the devices communicate at six times the
   speed of a link (docs.cloud.google.com/tpu/docs/tpu7x).
6. A hop takes 1 us (tpus, question 5). A transfer takes the time of its hops or of its bytes,
   whichever is longer. The longest path is half of a ring, or a complete line.
7. Before that, each stage takes `STAGE_S`. A collective has a stage for each axis of the grid that
   the group spans, and one for the devices of a chip; an all-reduce has them twice. A permute takes
   `SEND_S` instead. The links are free meanwhile.
8. Between slices, a collective gets `DCN_SHARE` of the documented bandwidth of the data-center
   network; a collective that adds numbers gets `DCN_SUM_SHARE`, because the hosts add them.

Comparison with other published measurements (measured, estimated): a reduce-scatter of 134 MB
between two chips of a v2, 1.13 and 1.21 ms (scaling book, profiling); permutes of 1 and 64 MiB to
the neighbor on v5p, 16.9 and 782 us, 16.1 and 750 us (marin-community/marin, issue 6736); an
all-gather of 34 MB over a line of 4 chips of v5e, 680 and 568 us (scaling book, sharding, pop
quiz 2).
`tpudist.xla.estimate.error_bar` has the spread of these rules.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from tpudist.xla.devices import slice_index
from tpudist.xla.hardware.chips import Chip

HOP_S = 1e-6  # rule 6
ALL_REDUCE_SHARE = 0.64  # rule 2
STAGE_S = 6.2e-6
"""Start-up of a stage (rule 7): the mean of the two published profiles of small all-gathers.

- tpu7x, 2 axes: 1.05, 4.2, 17, 67 and 268 MB over the 4 chips of a 2x2x1 take 21.9, 48.7, 155, 576
  and 2252 us, which is 14.7 us on average more than their bytes: 7.4 us per axis
  (AI-Hypercomputer/accelerator-microbenchmarks, Ironwood/guides/collectives/all_gather.md).
- v5e, 1 axis: 131 kB over a line of 4 chips take 8 us; 3 hops are 3 us, so 5 us (scaling
  book, sharding, pop quiz 2).
"""
SEND_S = 4.4e-6
"""Start-up of a permute to a neighbor (rule 7): 1 to 16 KiB take 4.5 to 5.5 us on v5p and 5.6 to
5.9 us on v6e, and the hop takes 1 us (marin-community/marin, issue 6736)."""
DCN_SUM_SHARE = 0.33
"""The only published measurement (rule 8): 4.11 of 12.5 GB/s per chip between slices of v6e-256
(AI-Hypercomputer/tpu-recipes, microbenchmarks/trillium/collectives, psum_dcn)."""
DCN_SHARE = 0.57
"""The geometric mean of that share and of 1, which is the documented bandwidth."""
_WITHIN_CHIP = 6.0  # rule 5
# Axis of the grid and direction (1 or -1), or `_INSIDE` a chip. Transfers with a common link
# compete for it.
Link = tuple[int, int]
_INSIDE: Link = (-1, 0)


@dataclasses.dataclass(frozen=True)
class Route:
    """The use of the links of a slice by one collective.

    Attributes:
        seconds: Seconds without other transfers, from the start on.
        busy_s: Seconds for which each `Link` is busy.
        start_up_s: Part of `seconds` before the first byte is sent.
    """

    seconds: float
    busy_s: Mapping[Hashable, float]
    start_up_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Span:
    """The extent of a group along one axis of the grid.

    Attributes:
        axis: Axis of the grid.
        size: Number of chips of the group in a row.
        stride: Distance between these chips, and so the number of groups that share the links.
        directions: 2 if the row is a ring, 1 if it is a line.
    """

    axis: int
    size: int
    stride: int
    directions: int

    @property
    def hops(self) -> int:
        farthest = self.size // 2 if self.directions == 2 else self.size - 1
        return farthest * self.stride


class Torus:
    """The chips of a mesh's devices, as one grid per slice.

    Args:
        mesh: Mesh of TPU devices.
        chip: Chip of the devices.

    Attributes:
        shape: Number of chips along each axis of the grid.
    """

    def __init__(self, mesh: Mesh, chip: Chip):
        self._chip = chip
        devices = list(mesh.devices.flat)
        coords = [tuple(device.coords) for device in devices]
        self._coords = np.array(coords).reshape(len(devices), -1)
        self._slices = np.array([slice_index(device) for device in devices])
        # The mesh may leave out chips of the slice, so the largest coordinates give the shape.
        self.shape = tuple(int(size) + 1 for size in self._coords.max(axis=0))
        wrapped = chip.ring_axes(self.shape[: chip.torus_dims])
        self._wrapped = (*wrapped, *(False,) * (len(self.shape) - len(wrapped)))
        # A loop asks for the same groups many times. Caches of the class would keep objects alive.
        self._spans = functools.cache(self._find_spans)
        self._permute_loads = functools.cache(self._follow_pairs)

    def crosses_slices(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether a group has devices of several slices."""
        return any(len({int(self._slices[i]) for i in group}) > 1 for group in groups)

    def route(self, kind: str, num_bytes: float, groups: tuple[tuple[int, ...], ...]) -> Route:
        """Returns the links and the time of a collective inside a slice.

        Args:
            kind: HLO opcode.
            num_bytes: Size of the complete operand or result on one device, whichever is larger.
            groups: Groups of devices, as positions in the flat mesh.
        """
        if kind in ("collective-permute", "send"):
            return self._route_of_permute(num_bytes, groups)
        size = max((len(group) for group in groups), default=1)
        if size < 2:
            return Route(0.0, {})
        spans, group_devices_per_chip = self._spans(groups)
        if not spans:  # both devices of one chip
            rate = _WITHIN_CHIP * self._chip.ici_bytes_per_s
            seconds = bytes_per_device(kind, num_bytes, size) / rate
            return Route(_start_up_s(kind, 1) + seconds, {_INSIDE: seconds}, _start_up_s(kind, 1))
        # The devices of a chip share its links evenly. A group with both devices has both shares.
        share = group_devices_per_chip / self._chip.devices_per_chip
        bytes_per_s = self._chip.ici_bytes_per_s * share
        if kind in ("all-to-all", "ragged-all-to-all"):
            seconds = max(
                num_bytes * span.size * span.stride / (4 * span.directions) / bytes_per_s
                for span in spans
            )
        else:
            rate = bytes_per_s * sum(span.directions / span.stride for span in spans)
            rate *= ALL_REDUCE_SHARE if kind == "all-reduce" else 1
            seconds = bytes_per_device(kind, num_bytes, size) / rate
        hops = sum(span.hops for span in spans) * _num_rounds(kind)
        seconds = max(seconds, hops * HOP_S)
        start_up_s = _start_up_s(kind, len(spans) + (group_devices_per_chip > 1))
        busy: dict[Hashable, float] = {
            (span.axis, sign): seconds for span in spans for sign in (1, -1)
        }
        return Route(start_up_s + seconds, busy, start_up_s)

    def _route_of_permute(self, num_bytes: float, pairs: tuple[tuple[int, ...], ...]) -> Route:
        loads, hops, inside = self._permute_loads(pairs)
        rate = self._chip.ici_bytes_per_s
        busy: dict[Hashable, float] = {link: num_bytes * load / rate for link, load in loads}
        if inside:
            busy[_INSIDE] = num_bytes / (_WITHIN_CHIP * rate)
        if not busy:
            return Route(0.0, {})
        return Route(SEND_S + max(*busy.values(), hops * HOP_S), busy, SEND_S)

    def _find_spans(self, groups: tuple[tuple[int, ...], ...]) -> tuple[list[_Span], int]:
        """Returns the axes that each group spans, and its devices per chip."""
        # All groups of a mesh are alike, with equal distances along an axis, so the first will do.
        coords = self._coords[list(groups[0])]
        num_chips = len(np.unique(coords, axis=0))
        spans = []
        for axis, length in enumerate(self.shape):
            positions = np.unique(coords[:, axis])
            if len(positions) < 2:
                continue
            stride = int(np.diff(positions).min())
            ring = self._wrapped[axis] and len(positions) * stride == length
            spans.append(_Span(axis, len(positions), stride, 2 if ring else 1))
        return spans, len(groups[0]) // num_chips

    def _follow_pairs(
        self, pairs: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[tuple[Link, int], ...], int, bool]:
        """Follows the paths of a permute.

        Returns:
            For each link, the number of transfers on its most loaded wire; the number of hops of
            the longest path; whether a pair is within a chip.
        """
        # A wire of a link is identified by the chip that it leaves.
        loads: dict[Link, dict[tuple[int, ...], int]] = defaultdict(lambda: defaultdict(int))
        coords, slices = self._coords.tolist(), self._slices.tolist()
        max_hops, inside = 0, False
        for source, target in pairs:
            position, hops = list(coords[source]), 0
            for axis, length in enumerate(self.shape):
                distance = coords[target][axis] - position[axis]
                # On a ring, go the shorter way around.
                if self._wrapped[axis] and abs(distance) * 2 > length:
                    distance -= int(math.copysign(length, distance))
                sign = 1 if distance > 0 else -1
                for _ in range(abs(distance)):
                    loads[axis, sign][(slices[source], *position)] += 1
                    position[axis] = (position[axis] + sign) % length
                hops += abs(distance)
            max_hops = max(max_hops, hops)
            inside |= source != target and hops == 0
        return tuple((link, max(x.values())) for link, x in loads.items()), max_hops, inside


def bytes_per_device(kind: str, num_bytes: float, group_size: int) -> float:
    """Returns the bytes that each device of a group receives, and also sends, over the network."""
    if kind in ("collective-permute", "collective-broadcast", "send"):
        return num_bytes
    return _num_rounds(kind) * num_bytes * (group_size - 1) / group_size


def dcn_share(kind: str) -> float:
    """Returns the share of the data-center network's bandwidth that a collective gets (rule 8)."""
    return DCN_SUM_SHARE if kind in ("all-reduce", "reduce-scatter") else DCN_SHARE


def _start_up_s(kind: str, num_stages: int) -> float:
    return _num_rounds(kind) * num_stages * STAGE_S


def _num_rounds(kind: str) -> int:
    return 2 if kind == "all-reduce" else 1  # first the parts of the sum are sent, then the sums
