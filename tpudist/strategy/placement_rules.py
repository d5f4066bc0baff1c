"""Placement rules for strategies: over which mesh axes an array is split, from its shape."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

Partitioner = Callable[..., Sequence[int]]


def split_largest_dim(
    shape: tuple[int, ...], axes: Mapping[str, int], min_size: int
) -> PartitionSpec:
    """Splits the largest dim that divides over `axes`; nothing if the array is small.

    Args:
        shape: Of the array.
        axes: Mesh axes to split over together, with their sizes.
        min_size: Elements below which an array is not worth splitting.
    """
    parts = math.prod(axes.values())
    if parts == 1 or math.prod(shape) < min_size:
        return PartitionSpec()
    fitting = [dim for dim, size in enumerate(shape) if size % parts == 0]
    if not fitting:
        return PartitionSpec()
    return _split(max(fitting, key=lambda d: shape[d]), axes)


def split_by_partitioner(
    shape: tuple[int, ...], dtype: Any, partitioner: Partitioner, axes: Mapping[str, int]
) -> tuple[PartitionSpec, str | None]:
    """Splits a dim over `axes`, if a partitioner wants as many pieces; and why not, if it does not.

    Mesh axes of n devices in all cut a dim into n equal pieces, neither more nor fewer. The
    partitioner is asked how many it wants along each dim, the largest first, and that dim is split
    which divides by n and of which it wants n pieces or more. So where it wants more than n it gets
    n larger pieces; where it wants from 2 to n - 1, or the dims do not divide, the array stays
    whole, and a text says so; where it wants one piece, the array stays whole as it should.

    Args:
        shape: Of the array.
        dtype: Of the array.
        partitioner: One of `tpudist.experimental.partitioners`, or any `partitioner(shape, dtype,
            axis=dim)` that gives the number of pieces along each dim.
        axes: Mesh axes to split over together, with their sizes.

    Raises:
        ValueError: The partitioner gives something else than one whole number for each dim.
    """
    parts = math.prod(axes.values())
    wanted = {}
    for dim in sorted(range(len(shape)), key=lambda d: -shape[d]):
        counts = partitioner(shape, dtype, axis=dim)
        _check_counts(counts, shape, partitioner)
        wanted[dim] = counts[dim]
    if parts == 1 or max(wanted.values(), default=1) == 1:
        return PartitionSpec(), None
    for dim, count in wanted.items():
        if count >= parts and shape[dim] % parts == 0:
            return _split(dim, axes), None
    several = {dim: count for dim, count in wanted.items() if count > 1}
    pieces = ", ".join(f"{count} along dim {dim}" for dim, count in several.items())
    over = ", ".join(f"{name}={size}" for name, size in axes.items())
    if max(wanted.values()) < parts:
        why = f"but {over} can only cut it into {parts} pieces or leave it whole"
    else:
        why = (
            f"but no dim of {list(shape)} that may be cut divides by the {parts} devices of {over}"
        )
    return PartitionSpec(), f"the partitioner wants {pieces}, {why}"


def _split(dim: int, axes: Mapping[str, int]) -> PartitionSpec:
    names: Any = tuple(axes)
    return PartitionSpec(*(None,) * dim, names if len(names) > 1 else names[0])


def _check_counts(counts: Any, shape: tuple[int, ...], partitioner: Partitioner) -> None:
    try:
        right = len(counts) == len(shape) and all(int(n) == n and n >= 1 for n in counts)
    except (TypeError, ValueError):
        right = False
    if not right:
        raise ValueError(
            f"The partitioner {type(partitioner).__name__} returned {counts!r} for an array of "
            f"shape {list(shape)}. It must return the number of pieces along each dim: "
            f"{len(shape)} integer(s) of at least 1."
        )
