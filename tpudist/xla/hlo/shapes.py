"""Parses the shapes in HLO text: dtypes, sizes, layouts and memory spaces.

`bf16[8,512]{1,0:T(8,128)(2,1)S(1)}` is an array of 8 x 512 whose minor dim is the second, laid out
in tiles of 8 x 128, in memory space 1. Syntax: openxla.org/xla/tiled_layout.
"""

import dataclasses
import functools
import math
import re

# Memory spaces of a TPU. Sources: xla/layout.h and the names in `compiled.as_text()`.
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
        dtype: HLO's name of the dtype, such as "bf16".
        dims: Sizes of the dims; the bound of a dynamic dim.
        minor_to_major: Numbers of the dims; the dim that varies fastest in memory is first.
        tile: Sizes of the tile to which the minor dims are padded, minor dim last; empty if none.
        memory_space: `HBM`, `VMEM` or `HOST`.
    """

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    memory_space: int = HBM

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Size without padding."""
        return -(-self.num_elements * num_bits(self.dtype) // 8)

    @property
    def padded_bytes(self) -> int:
        """Size in memory, with the minor dims padded to complete tiles."""
        # `tile` is minor dim last and `sizes` minor dim first. A tile with more dims than the array
        # pads it as if it had dims of size 1: f32[5] in T(8,128) takes a full tile.
        order = self.minor_to_major or tuple(reversed(range(len(self.dims))))
        sizes = [self.dims[dim] for dim in order]
        for i, size in enumerate(reversed(self.tile)):
            if i == len(sizes):
                sizes.append(1)
            sizes[i] = -(-sizes[i] // size) * size
        return -(-math.prod(sizes) * num_bits(self.dtype) // 8)


@functools.lru_cache(maxsize=4096)
def arrays(shape: str) -> tuple[Array, ...]:
    """Returns the array of a shape, or all arrays of a tuple at any depth."""
    return tuple(_parse_array(match) for match in _ARRAY.finditer(shape))


def _parse_array(match: re.Match) -> Array:
    dims = tuple(int(dim.lstrip("<=")) for dim in match["dims"].split(",") if dim)
    order, _, rest = (match["layout"] or "").partition(":")
    # Only the first tile: later ones, such as (2,1), reorder the elements inside it.
    tile = _TILE.search(rest) if rest.startswith("T") else None
    space = _SPACE.search(rest)
    return Array(
        match["dtype"],
        dims,
        tuple(int(dim) for dim in order.split(",") if dim),
        # "*" combines a dim with the next one, and neither is padded.
        tuple(int(size) for size in tile[1].split(",") if size != "*") if tile else (),
        int(space[1]) if space else HBM,
    )


def num_bytes(shape: str) -> int:
    """Returns the bytes of a shape such as `f32[8,128]{1,0:T(8,128)}`, without padding."""
    return sum(array.num_bytes for array in arrays(shape))


def num_bits(dtype: str) -> int:
    """Returns the bits of one element: 16 for "bf16", 4 for "s4", 0 for a non-number ("token")."""
    if dtype == "pred":
        return 8
    bits = re.match(r"[a-z]+(\d+)", dtype)  # s4, bf16, c64, f8e4m3fn; not token, opaque
    return int(bits[1]) if bits else 0


def tuple_parts(shape: str) -> list[str]:
    """Returns the elements of a tuple shape: `(f32[2,3], (u32[], u8[4]))` has two."""
    # Splits at commas outside of inner brackets; the outermost parentheses are skipped.
    parts, depth, begin = [], 0, 1
    for bracket in re.finditer(r"[()\[\]{},]", shape[:-1]):
        char, position = bracket[0], bracket.start()
        if position == 0:
            continue
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(shape[begin:position])
            begin = position + 1
    return [*parts, shape[begin:-1]]
