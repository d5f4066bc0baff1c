"""Copies of arrays whose dims lie in another order, in tiles that stay in a core's cache.

NumPy goes through such an array an element at a time, each from another line of memory: six times
slower for a matrix of 14336 x 4096 bfloat16 (0.27 and 1.7 GB/s on one core of the machine that
`docs/pretrained.md` measures).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.lib.stride_tricks import as_strided

_RUN = 512  # elements that are read in a row
_LINE = 32  # bytes that are written in a row: half a line of a cache
_TASK = 2**22  # elements of a task


def copy_tasks(source: np.ndarray, target: np.ndarray) -> Iterator[Callable[[], None]]:
    """Parts of the work of `target[...] = source`, which may run side by side.

    Args:
        source: Any strides; of another floating dtype, its elements are rounded.
        target: Of the same shape, any strides.
    """
    source, target = _merge_dims(source, target)
    if target.ndim < 2 or _last_by_stride(source) == _last_by_stride(target):
        if target.ndim == 0 or target.size <= _TASK:
            yield lambda: _assign(source, target)
            return
        rows = max(1, _TASK * target.shape[0] // target.size)
        for i in range(0, target.shape[0], rows):
            yield _task(_assign, source[i : i + rows], target[i : i + rows])
        return
    read, written = _last_by_stride(source), _last_by_stride(target)
    rest = tuple(dim for dim in range(target.ndim) if dim not in (read, written))
    order = (*rest, read, written)
    source, target = source.transpose(order), target.transpose(order)
    rows = max(_LINE, _TASK // source.shape[-2])
    for where in np.ndindex(source.shape[:-2]):
        of, to = source[where], target[where]
        for j in range(0, of.shape[1], rows):
            yield _task(_copy_tiles, of[:, j : j + rows], to[:, j : j + rows])


def _task(
    run: Callable[[np.ndarray, np.ndarray], None], of: np.ndarray, to: np.ndarray
) -> Callable[[], None]:
    return lambda: run(of, to)


def _copy_tiles(source: np.ndarray, target: np.ndarray) -> None:
    """Of two dims, the first of which lies together in `source`, and the second in `target`."""
    line = max(1, _LINE // target.itemsize)
    for i in range(0, target.shape[0], _RUN):
        for j in range(0, target.shape[1], line):
            tile = np.s_[i : i + _RUN, j : j + line]
            _assign(source[tile], target[tile])


def _assign(source: np.ndarray, target: np.ndarray) -> None:
    if source.dtype == target.dtype:
        target[...] = source
    else:  # first in the order in which it lies: casts of other strides are slower
        order = np.argsort(source.strides)[::-1]
        target.transpose(order)[...] = source.transpose(order).astype(target.dtype)


def _last_by_stride(array: np.ndarray) -> int:
    """The dim whose elements lie closest together; dims of one element do not count."""
    strides = [
        stride if size > 1 else np.iinfo(np.int64).max
        for stride, size in zip(array.strides, array.shape, strict=True)
    ]
    return int(np.argmin(strides))


def _merge_dims(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both, with neighbouring dims as one where they lie so in both."""
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
