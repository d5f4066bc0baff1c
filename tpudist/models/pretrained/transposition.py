"""Fast copies of transposed arrays, in tiles that stay in the cache of a core.

NumPy copies such an array element by element, each from another cache line. For a matrix of
14336 x 4096 bfloat16 that is six times slower (0.27 instead of 1.7 GB/s on one core of the machine
in `docs/pretrained.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.lib.stride_tricks import as_strided

# Size of a tile: elements that are consecutive in the source, times bytes that are consecutive in
# the target, half a cache line.
_RUN_ELEMENTS, _LINE_BYTES = 512, 32
_TASK_ELEMENTS = 2**22  # so that a task takes much longer than its start in a thread


def copy_tasks(source: np.ndarray, target: np.ndarray) -> Iterator[Callable[[], None]]:
    """Yields functions that together do `target[...] = source`; they may run in parallel.

    Args:
        source: Array with any strides. Elements of another floating dtype are rounded.
        target: Array of the same shape, with any strides.
    """
    source, target = _merge_dims(source, target)
    # Both arrays have the same contiguous dim, so NumPy copies whole lines; only the size of a task
    # must be bounded.
    if target.ndim < 2 or _last_by_stride(source) == _last_by_stride(target):
        if target.ndim == 0 or target.size <= _TASK_ELEMENTS:
            yield lambda: _assign(source, target)
            return
        rows = max(1, _TASK_ELEMENTS * target.shape[0] // target.size)
        for i in range(0, target.shape[0], rows):
            yield _task(_assign, source[i : i + rows], target[i : i + rows])
        return
    read, written = _last_by_stride(source), _last_by_stride(target)
    rest = tuple(dim for dim in range(target.ndim) if dim not in (read, written))
    order = (*rest, read, written)
    source, target = source.transpose(order), target.transpose(order)
    columns = max(_LINE_BYTES // target.itemsize, _TASK_ELEMENTS // source.shape[-2])
    for index in np.ndindex(source.shape[:-2]):
        matrix, target_matrix = source[index], target[index]
        for j in range(0, matrix.shape[1], columns):
            part = np.s_[:, j : j + columns]
            yield _task(_copy_tiles, matrix[part], target_matrix[part])


def _task(
    copy: Callable[[np.ndarray, np.ndarray], None], source: np.ndarray, target: np.ndarray
) -> Callable[[], None]:
    # Not a lambda in the loop of `copy_tasks`: the loop's variables would change under it.
    return lambda: copy(source, target)


def _copy_tiles(source: np.ndarray, target: np.ndarray) -> None:
    """Copies a matrix whose dim 0 is contiguous in `source`, and dim 1 in `target`."""
    line = max(1, _LINE_BYTES // target.itemsize)
    for i in range(0, target.shape[0], _RUN_ELEMENTS):
        for j in range(0, target.shape[1], line):
            tile = np.s_[i : i + _RUN_ELEMENTS, j : j + line]
            _assign(source[tile], target[tile])


def _assign(source: np.ndarray, target: np.ndarray) -> None:
    if source.dtype == target.dtype:
        target[...] = source
    else:
        # Cast in the memory order of the source first: a cast with other strides is slower.
        order = np.argsort(source.strides)[::-1]
        target.transpose(order)[...] = source.transpose(order).astype(target.dtype)


def _last_by_stride(array: np.ndarray) -> int:
    """Returns the dim with the smallest stride; dims of one element do not count."""
    strides = [
        stride if size > 1 else np.iinfo(np.int64).max
        for stride, size in zip(array.strides, array.shape, strict=True)
    ]
    return int(np.argmin(strides))


def _merge_dims(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns both arrays with neighboring dims merged if they are contiguous in both."""
    # From the outer to the inner dim. Two dims are one if a step in the outer one is as long as all
    # steps of the inner one.
    shape: list[int] = []
    strides: list[tuple[int, int]] = []
    for size, *pair in zip(target.shape, source.strides, target.strides, strict=True):
        if size == 1:
            continue
        if shape and strides[-1] == (pair[0] * size, pair[1] * size):
            shape[-1] *= size
            strides[-1] = (pair[0], pair[1])
        else:
            shape.append(size)
            strides.append((pair[0], pair[1]))
    first, second = zip(*strides, strict=True) if strides else ((), ())
    return (
        as_strided(source, shape, first, writeable=False),
        as_strided(target, shape, second),
    )
