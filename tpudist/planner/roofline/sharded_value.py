"""The values of a program on one device: their shapes there, and the mesh axes that split them."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

Axes = tuple[tuple[str, ...], ...]
"""Mesh axes that split each dim."""
Sizes = Mapping[str, int]
"""Sizes of the mesh axes."""


_SUBLANES, _LANES = 8, 128  # of a tile: jax-ml/scaling-book, tpus.md
CLOCK = itertools.count(1)
"""Ticks once for each buffer and each loop of a walk."""


@dataclasses.dataclass(eq=False, slots=True)
class Buffer:
    """Memory of a value that an operation writes.

    Attributes:
        num_bytes: Size; for a part of a larger buffer, the bytes that reading it takes.
        is_product: Whether a product writes it, which may contain the operation that reads it.
        parents: Buffers that it is a part of.
        users: Number of values that are computed from it, for its lifetime.
        live_bytes: Bytes that end with its last user; 0 for memory of the caller.
        number: Tick of the clock when it was written.
        last_pass: Tick of the last loop that read it, or of the product that wrote it.
        spare_bytes: Bytes that HBM can move at no cost while the product computes it.
    """

    num_bytes: float
    is_product: bool = False
    parents: tuple["Buffer", ...] = ()
    users: int = 0
    live_bytes: float = 0.0
    number: int = dataclasses.field(default_factory=lambda: next(CLOCK))
    last_pass: int = 0
    spare_bytes: float = 0.0


@dataclasses.dataclass(eq=False, slots=True)
class Work:
    """Operations on elements, which the vector units do where a value is read.

    Attributes:
        num_ops: Number of operations.
        last_pass: Tick of the last loop that did them.
    """

    num_ops: float
    last_pass: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value on one device.

    Attributes:
        shape: Shape on the device.
        axes: The mesh axes that split each dim.
        item_bytes: Bytes per element.
        partial: Axes over which the devices have addends of it.
        reads: Buffers that an operation reads to get it: its own, or those of a fused computation.
        work: Operations of the fused computation.
        origin: Identifies its numbers, which may have another dtype or order there.
        is_single: Whether each value since the last buffer has one use.
        is_state: Whether it follows from the state of the training, and not from the batch.
        num_sums: Largest number of small sums over devices that follow from each other before it.
    """

    shape: tuple[int, ...]
    axes: Axes
    item_bytes: float
    partial: frozenset[str] = frozenset()
    reads: frozenset[Buffer] = frozenset()
    work: frozenset[Work] = frozenset()
    origin: object = None
    is_single: bool = True
    is_state: bool = False
    num_sums: int = 0

    @property
    def num_bytes(self) -> float:
        """Bytes on the device."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def read_bytes(self) -> float:
        """Bytes of the buffers that it is computed from."""
        return sum(buffer.num_bytes for buffer in self.reads)


def fills_lanes(images: int, features: int) -> bool:
    """Returns whether images, and not features, are the lanes of the tiles of an array.

    They are if they need less padding (60 convolutions by libtpu 0.0.50).
    """
    return _pad(images, features) < _pad(features, images)


def tile_padding(images: int, features: int) -> float:
    """Returns the factor by which the tiles of an array of images enlarge it."""
    return min(_pad(images, features), _pad(features, images)) / max(1, images * features)


def _pad(lanes: int, sublanes: int) -> int:
    rows = min(_SUBLANES, 1 << max(0, sublanes - 1).bit_length())
    return -(-lanes // _LANES) * _LANES * -(-sublanes // rows) * rows


def unsplit(rank: int) -> Axes:
    """Returns the axes of a value that is not split."""
    return ((),) * rank


def names_in(axes: Axes) -> set[str]:
    """Returns the axes that split any dim."""
    return set(itertools.chain.from_iterable(axes))


def num_parts(names: Sequence[str], sizes: Sizes) -> int:
    """Returns the number of parts of a dim that these axes split."""
    return math.prod(sizes[name] for name in names)


def fit(shape: Sequence[int], axes: Axes, sizes: Sizes, traced: Sizes) -> Axes:
    """Returns the axes that divide their dim.

    Args:
        shape: Complete shape in the trace.
        axes: Axes for each dim.
        sizes: Sizes of the axes.
        traced: Sizes of the axes in the trace. A dim with one element per device of the trace has
            one per device here.
    """
    found = []
    for size, names in zip(shape, axes, strict=True):
        kept = [name for name in names if sizes.get(name, 1) > 1]
        is_per_device = len(names) > 0 and size == math.prod(traced.get(name, 1) for name in names)
        while kept and not is_per_device and size % num_parts(kept, sizes):
            kept.pop()
        found.append(tuple(kept))
    return tuple(found)


def local_shape(shape: Sequence[int], axes: Axes, sizes: Sizes) -> tuple[int, ...]:
    """Returns the shape on one device."""
    return tuple(
        -(-n // num_parts(names, sizes)) if names else n
        for n, names in zip(shape, axes, strict=True)
    )


def resize(shape: Sequence[int], axes: Axes, sizes: Sizes, traced: Sizes) -> tuple[int, ...]:
    """Returns a complete shape for axes of other sizes than in the trace.

    If a dim has one element per device of the trace, and a later dim without axes the rest, the
    first gets one element per device here.
    """
    found = list(shape)
    for dim, names in enumerate(axes):
        before, after = math.prod(traced.get(n, 1) for n in names), num_parts(names, sizes)
        if not names or shape[dim] != before or before == after:
            continue
        for rest in range(dim + 1, len(found)):
            if not axes[rest] and found[rest] > 1 and found[rest] * before % after == 0:
                found[dim], found[rest] = after, found[rest] * before // after
                break
    return tuple(found)


def reshape_axes(
    before: Sequence[int], after: Sequence[int], value: Value, sizes: Sizes
) -> tuple[Axes, tuple[int, ...]]:
    """Returns the axes and the shape on the device of a reshaped value.

    An axis that is larger than the first of the dims into which its dim is split has the next dims
    too: the rows of such a dim are on one device, though no axis names it.

    Args:
        before: Complete shape of the operand.
        after: Complete shape of the result.
        value: The operand.
        sizes: Sizes of the axes.
    """
    found: list[tuple[str, ...]] = [()] * len(after)
    parts = [1] * len(after)
    i = j = 0
    while i < len(before) and j < len(after):
        first_i, first_j = i, j
        size, other = before[i], after[j]
        i, j = i + 1, j + 1
        while size != other and (i < len(before) if size < other else j < len(after)):
            if size < other:
                size, i = size * before[i], i + 1
            else:
                other, j = other * after[j], j + 1
        target = first_j
        for dim in range(first_i, i):
            # If an outer dim has several rows here, those of this dim are apart in the result.
            is_apart = any(value.shape[k] > 1 for k in range(first_i, dim))
            names = [] if is_apart else [(name, sizes[name]) for name in value.axes[dim]]
            unnamed = before[dim] // max(1, value.shape[dim] * num_parts(value.axes[dim], sizes))
            for name, count in (*names, ("", unnamed)):
                target = _place(name, count, after, parts, found, range(target, j))
    shape = tuple(-(-size // count) for size, count in zip(after, parts, strict=True))
    return tuple(found), shape


def _place(
    name: str,
    count: int,
    after: Sequence[int],
    parts: list[int],
    found: list[tuple[str, ...]],
    dims: range,
) -> int:
    """Splits the first of `dims` that have room into `count` parts; returns the last of them."""
    for dim in dims:
        part = math.gcd(count, after[dim] // parts[dim])
        if count == 1 or part == 1:
            if after[dim] > parts[dim] and count > 1:
                break  # this dim does not divide, and a later one would mix the rows
            continue
        parts[dim] *= part
        count //= part
        if name:
            found[dim] += (name,)
            name = ""
        if count == 1:
            return dim
    return dims.start if dims else 0
