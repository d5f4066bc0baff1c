"""Placement rules for strategies: functions from a shape to the mesh axes that split each dim."""

import math
from collections.abc import Callable, Mapping, Sequence

from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tpudist.array_types import Shape

# Called with a shape, a dtype and `axis=dim`; returns the number of pieces along each dim.
Partitioner = Callable[..., Sequence[int]]


def split_largest_dim(shape: Shape, axes: Mapping[str, int], min_size: int) -> PartitionSpec:
    """Splits the largest dim that divides by the devices of `axes`.

    Args:
        shape: Shape of the array.
        axes: Mesh axes to split over together, with their sizes.
        min_size: Number of elements below which an array stays whole.
    """
    parts = math.prod(axes.values())
    if parts == 1 or math.prod(shape) < min_size:
        return PartitionSpec()
    fitting = [dim for dim, size in enumerate(shape) if size % parts == 0]
    if not fitting:
        return PartitionSpec()
    # Of equally large dims the first: all processes must decide alike.
    return _split(max(fitting, key=lambda d: shape[d]), axes)


def split_by_partitioner(
    shape: Shape, dtype: DTypeLike, partitioner: Partitioner, axes: Mapping[str, int]
) -> tuple[PartitionSpec, str | None]:
    """Splits a dim over `axes` if a partitioner wants that, and explains if it cannot.

    Mesh axes with n devices together cut a dim into exactly n equal pieces. The partitioner returns
    the number of pieces that it wants along each dim, the largest dim first. The first dim that
    divides by n and should have at least n pieces is split. So if it wants more than n
    pieces, it gets n larger ones. If it wants 2 to n - 1, or no dim divides, the array stays whole,
    and the second result says why. If it wants one piece, the array stays whole as requested.

    Args:
        shape: Shape of the array.
        dtype: Dtype of the array.
        partitioner: One of `tpudist.experimental.partitioners`, or any `partitioner(shape, dtype,
            axis=dim)` that returns the number of pieces along each dim.
        axes: Mesh axes to split over together, with their sizes.

    Returns:
        The split, and the reason why the array stays whole against the wish of the partitioner.

    Raises:
        ValueError: If the partitioner does not return one integer for each dim.
    """
    parts = math.prod(axes.values())
    # A partitioner of tf.distribute is called with one `axis` and allows pieces only along it, so
    # it is called for each dim. The order of this dict, the largest dim first, decides below which
    # dim is split.
    num_pieces = {}
    for dim in sorted(range(len(shape)), key=lambda d: -shape[d]):
        counts = partitioner(shape, dtype, axis=dim)
        _check_counts(counts, shape, partitioner)
        num_pieces[dim] = counts[dim]
    if parts == 1 or max(num_pieces.values(), default=1) == 1:
        return PartitionSpec(), None
    for dim, count in num_pieces.items():
        if count >= parts and shape[dim] % parts == 0:
            return _split(dim, axes), None
    several = {dim: count for dim, count in num_pieces.items() if count > 1}
    pieces = ", ".join(f"{count} along dim {dim}" for dim, count in several.items())
    over = ", ".join(f"{name}={size}" for name, size in axes.items())
    if max(num_pieces.values()) < parts:
        why = f"but {over} can only cut it into {parts} pieces or leave it whole"
    else:
        why = (
            f"but no dim of {list(shape)} that may be cut divides by the {parts} devices of {over}"
        )
    return PartitionSpec(), f"the partitioner wants {pieces}, {why}"


def _split(dim: int, axes: Mapping[str, int]) -> PartitionSpec:
    return PartitionSpec(*(None,) * dim, tuple(axes))


def _check_counts(counts: Sequence[int], shape: Shape, partitioner: Partitioner) -> None:
    try:
        are_valid = len(counts) == len(shape) and all(int(n) == n and n >= 1 for n in counts)
    except (TypeError, ValueError):
        are_valid = False
    if not are_valid:
        raise ValueError(
            f"The partitioner {type(partitioner).__name__} returned {counts!r} for an array of "
            f"shape {list(shape)}. It must return the number of pieces along each dim: "
            f"{len(shape)} integer(s) of at least 1."
        )
