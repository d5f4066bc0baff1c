"""Files of tensors in the format safetensors, read a tensor at a time and written so.

The package `safetensors` checks the files that are read. Its own reading makes a copy of a tensor
that stays in memory beside what is made of it, and its writing wants all tensors of a file at once.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: The file.
        dtype: As the format calls it.
        shape: Its shape.
        start: Where its bytes begin in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def map(self) -> np.ndarray:
        """Its elements: pages of the file, which the system begins to read."""
        dtype = DTYPES[self.dtype]
        size = math.prod(self.shape) * dtype.itemsize
        before = self.start % mmap.ALLOCATIONGRANULARITY
        with self.file.open("rb") as opened:
            pages = mmap.mmap(
                opened.fileno(), before + size, access=mmap.ACCESS_READ, offset=self.start - before
            )
        if hasattr(mmap, "MADV_WILLNEED"):
            pages.madvise(mmap.MADV_WILLNEED)
        return np.frombuffer(pages, np.uint8, size, before).view(dtype).reshape(self.shape)


def read_header(file: Path) -> tuple[bytes, dict[str, StoredTensor]]:
    """The first bytes of a file, up to the first tensor, and its tensors by name.

    Raises:
        ValueError: The file is damaged.
    """
    import safetensors

    try:
        with safetensors.safe_open(file, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{file} is not a complete safetensors file: {error}. Download it again."
        ) from error
    with file.open("rb") as opened:
        length = opened.read(8)
        header = length + opened.read(struct.unpack("<Q", length)[0])
    found: dict[str, StoredTensor] = {}
    for name, about in json.loads(header[8:]).items():
        if name != "__metadata__":
            start = len(header) + about["data_offsets"][0]
            found[name] = StoredTensor(file, about["dtype"], tuple(about["shape"]), start)
    return header, found


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a file of tensors: names, dtypes as the format calls them, and shapes.

    Tensors are laid out in the order given.
    """
    about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + int(np.prod(shape)) * DTYPES[dtype].itemsize
        about[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
