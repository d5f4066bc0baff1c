"""Reads shapes as HLO writes them: dtypes, sizes, layouts, and the memory an array lives in.

`bf16[8,512]{1,0:T(8,128)(2,1)S(1)}` is an array of 8 x 512 whose minor dim is the second, laid out
in tiles of 8 x 128, in memory space 1. Syntax: openxla.org/xla/tiled_layout.
"""

import dataclasses
import functools
import math
import re

# Memory spaces of a TPU: xla/layout.h and the names in `compiled.as_text()`.
HBM = 0
VMEM = 1
HOST = 5

_ARRAY = re.compile(r"\b(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=]*)\](?:\{(?P<layout>[^{}]*)\})?")
_TILE = re.compile(r"\(([\d,*]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape.

    Attributes:
        dtype: As HLO writes it, such as "bf16".
        dims: Its sizes; a dynamic dim counts at its bound.
        minor_to_major: Its dims, that which varies fastest in memory first.
        tile: Sizes of the tile that its minor dims are padded to, minor dim last; empty if none.
        memory_space: 0 is the device's main memory, 1 VMEM, 5 the host's memory.
    """

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    memory_space: int = HBM

    @property
    def num_elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Its size without padding."""
        return -(-self.num_elements * num_bits(self.dtype) // 8)

    @property
    def padded_bytes(self) -> int:
        """What it takes in memory, its minor dims filled up to whole tiles."""
        order = self.minor_to_major or tuple(reversed(range(len(self.dims))))
        sizes = [self.dims[dim] for dim in order]
        for place, size in enumerate(reversed(self.tile)):
            if place == len(sizes):
                sizes.append(1)
            sizes[place] = -(-sizes[place] // size) * size
        return -(-math.prod(sizes) * num_bits(self.dtype) // 8)


@functools.lru_cache(maxsize=4096)
def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape: one, or all those of a tuple, however deep."""
    return tuple(_array(match) for match in _ARRAY.finditer(shape))


def _array(match: re.Match) -> Array:
    dims = tuple(int(dim.lstrip("<=")) for dim in match["dims"].split(",") if dim)
    order, _, rest = (match["layout"] or "").partition(":")
    tile = _TILE.search(rest) if rest.startswith("T") else None
    space = _SPACE.search(rest)
    return Array(
        match["dtype"],
        dims,
        tuple(int(dim) for dim in order.split(",") if dim),
        # "*" joins a dim with the next one; what it stands for is never padded.
        tuple(int(size) for size in tile[1].split(",") if size != "*") if tile else (),
        int(space[1]) if space else HBM,
    )


def num_bytes(shape: str) -> int:
    """Bytes of a shape such as `f32[8,128]{1,0:T(8,128)}`, or of a tuple of them; no padding."""
    return sum(array.num_bytes for array in arrays(shape))


def num_bits(dtype: str) -> int:
    """Bits of one element: 16 of "bf16", 4 of "s4", 0 of what holds no numbers ("token")."""
    if dtype == "pred":
        return 8
    bits = re.match(r"[a-z]+(\d+)", dtype)  # s4, bf16, c64, f8e4m3fn; not token, opaque
    return int(bits[1]) if bits else 0


def tuple_parts(shape: str) -> list[str]:
    """The elements of a tuple shape: `(f32[2,3], (u32[], u8[4]))` has two."""
    parts, depth, begin = [], 0, 1
    for found in re.finditer(r"[()\[\]{},]", shape[:-1]):
        char, at = found[0], found.start()
        if at == 0:
            continue
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(shape[begin:at])
            begin = at + 1
    return [*parts, shape[begin:-1]]
