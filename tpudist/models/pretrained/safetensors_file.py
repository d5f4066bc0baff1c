"""Files of tensors in the format safetensors, read and written one tensor at a time.

The package `safetensors` checks the files. Its own reader would copy each tensor once more, and its
writer needs all tensors of a file at once.
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

DTYPE_OF_NAME: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
}
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPE_OF_NAME.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: Path of the file.
        dtype: Name of the dtype in the format, such as "BF16".
        shape: Shape.
        start: Offset of its bytes in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def map(self) -> np.ndarray:
        """Returns the elements as mapped pages of the file, which the system starts to read."""
        dtype = DTYPE_OF_NAME[self.dtype]
        size = math.prod(self.shape) * dtype.itemsize
        # A mapping must start at a multiple of the page size: map from the page before.
        before = self.start % mmap.ALLOCATIONGRANULARITY
        with self.file.open("rb") as opened:
            pages = mmap.mmap(
                opened.fileno(), before + size, access=mmap.ACCESS_READ, offset=self.start - before
            )
        if hasattr(mmap, "MADV_WILLNEED"):  # Python has this constant only on some systems
            pages.madvise(mmap.MADV_WILLNEED)
        return np.frombuffer(pages, np.uint8, size, before).view(dtype).reshape(self.shape)


def read_header(file: Path) -> tuple[bytes, dict[str, StoredTensor]]:
    """Returns the bytes of a file before the first tensor, and its tensors by name.

    Raises:
        ValueError: If the file is damaged.
    """
    import safetensors

    try:
        # Opening checks the header: offsets without gaps or overlaps, and a file of the right
        # length.
        with safetensors.safe_open(file, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{file} is not a complete safetensors file: {error}. Download it again."
        ) from error
    with file.open("rb") as opened:
        length = opened.read(8)
        header = length + opened.read(struct.unpack("<Q", length)[0])
    # The format: the length of the JSON header as 8 bytes, little-endian; the header; the tensors.
    tensors: dict[str, StoredTensor] = {}
    for name, facts in json.loads(header[8:]).items():
        if name != "__metadata__":
            start = len(header) + facts["data_offsets"][0]
            tensors[name] = StoredTensor(file, facts["dtype"], tuple(facts["shape"]), start)
    return header, tensors


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Returns the bytes of a file before its first tensor.

    Args:
        tensors: Name, dtype as the format names it, and shape of each tensor, in their order.
    """
    # Some libraries refuse a file without this entry, which names PyTorch as the writer.
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * DTYPE_OF_NAME[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors to 8 bytes
    return struct.pack("<Q", len(text)) + text
