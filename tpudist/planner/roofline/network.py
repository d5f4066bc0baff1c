"""Prices of computation and communication on the devices of a mesh: those of compiled programs."""

import functools
import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from tpudist.xla.devices import slice_index
from tpudist.xla.estimate import instruction_time
from tpudist.xla.estimate.instruction_time import Rates
from tpudist.xla.hardware import links
from tpudist.xla.hardware.chips import Chip

# Gathers of these generations run in parallel with the products of the same loop, by the schedules
# of libtpu 0.0.50 (`xla.compiler.compiler_options`). Sums, and gathers of others, are waited for.
_HIDE_GATHERS = ("v4", "v5e", "v5p", "tpu7x")
_SUBLANES = 8  # rows of a tile of the vector unit: jax-ml/scaling-book, tpus.md


class Network:
    """The devices of a mesh and their links.

    Attributes:
        chip: Chip of the devices.
        rates: Rates of one device.
        sizes: Sizes of the mesh axes.
        num_slices: Number of slices.
        hides_gathers: Whether gathers run in parallel with products.
    """

    def __init__(self, mesh: Mesh, chip: Chip):
        self.chip, self.rates = chip, Rates.of(chip)
        self.sizes = {str(name): size for name, size in mesh.shape.items()}
        self.hides_gathers = chip.generation in _HIDE_GATHERS
        self._torus = links.Torus(mesh, chip)
        self._positions = np.arange(mesh.size).reshape(mesh.devices.shape)
        self._slices = [slice_index(device) for device in mesh.devices.flat]
        self.num_slices = len({*self._slices})
        self._dcn_bytes_per_s = chip.dcn_bytes_per_s / chip.devices_per_chip
        self.seconds = functools.cache(self._seconds)

    def scatters_sums(self, axes: frozenset[str]) -> bool:
        """Returns whether a sum becomes a reduce-scatter if each device needs only a part.

        By programs of libtpu 0.0.50: it is, except over a complete slice of three dims (v4, v5p) or
        of two equal ones (4x4, 8x8, 16x16 of v5e and v6e), which adds up everything.
        """
        group, _ = self._group(axes)
        dims = [size for size in self._torus.shape if size > 1]
        is_complete = len(group) * self.num_slices == self._positions.size
        is_even = len(dims) > 2 or (len(dims) == 2 and dims[0] == dims[1] > 2)
        return not (is_complete and is_even)

    def _seconds(self, kind: str, num_bytes: float, axes: frozenset[str]) -> float:
        """Returns the time of a collective of `num_bytes` along mesh axes.

        A collective across slices runs inside each slice, and its part of each device between them.
        """
        group, num_slices = self._group(axes)
        groups: tuple[tuple[int, ...], ...] = (group,)
        if kind == "collective-permute":
            groups = tuple(zip(group, self._receivers(group, axes), strict=True))
        seconds = self._torus.route(kind, num_bytes, groups).seconds
        if num_slices > 1:
            sent = links.bytes_per_device(kind, num_bytes / len(group), num_slices)
            seconds += sent / (self._dcn_bytes_per_s * links.dcn_share(kind))
        return seconds

    def _receivers(self, group: Sequence[int], axes: frozenset[str]) -> list[int]:
        """Returns the next device of each, or along two axes the device after they are swapped."""
        first, *others = [size for name, size in self.sizes.items() if name in axes]
        if len(others) != 1:
            return [*group[1:], group[0]]
        small, large = sorted((first, *others))
        # The larger axis is `small` parts of it, each of the remaining size.
        shape = (small, large // small, small) if first == large else (small, small, large // small)
        swapped = np.array(group).reshape(shape).swapaxes(0, 2 if first == large else 1)
        return swapped.ravel().tolist()

    @functools.cache  # noqa: B019  (a network lives as long as one ranking)
    def _group(self, axes: frozenset[str]) -> tuple[tuple[int, ...], int]:
        """Returns the devices of one group in its first slice, and its number of slices."""
        index = tuple(slice(None) if name in axes else 0 for name in self.sizes)
        group = self._positions[index].reshape(-1).tolist()
        first = self._slices[group[0]]
        num_slices = len({self._slices[i] for i in group})
        return tuple(i for i in group if self._slices[i] == first), num_slices

    def share_of_unit(self, rows: float, summed: float, columns: float) -> float:
        """Returns the share of the matrix unit that a matrix product of these dims fills."""
        # The unit multiplies squares of its width, and rows in tiles: the rest is padding.
        width = self.rates.unit_width
        small, large = sorted((rows, columns))
        return 1 / (_pad(small, width) * _pad(large, _SUBLANES) * _pad(summed, width))

    def product_seconds(
        self, flops: float, kind: str, share: float, convolves: bool, num_bytes: float
    ) -> float:
        """Returns the time of a matrix multiplication or convolution.

        Args:
            flops: Number of operations.
            kind: Kind of its numbers.
            share: Share of the matrix unit that it fills.
            convolves: Whether it is a convolution, which always waits as if it only read.
            num_bytes: Bytes to and from HBM.
        """
        at_rate_s = flops / self.rates.flops_per_s((kind,)) / share
        hbm_s = num_bytes / self.rates.hbm_bytes_per_s
        seconds, reads = max(at_rate_s, hbm_s), convolves or hbm_s > at_rate_s
        overhead_s = instruction_time.product_overhead_s(seconds, reads=reads)
        if not num_bytes:
            overhead_s = min(overhead_s, self.rates.vmem_overhead_s(seconds))
        return seconds + overhead_s

    def host_seconds(self, num_bytes: float) -> float:
        """Returns the time of a copy to or from the host."""
        return num_bytes / (self.chip.host_bytes_per_s / self.chip.devices_per_chip)


def _pad(size: float, multiple: int) -> float:
    """Returns the factor by which padding to a multiple enlarges a dim."""
    return math.ceil(size / multiple) * multiple / size if size else 1.0
