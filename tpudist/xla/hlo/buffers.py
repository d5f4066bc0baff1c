"""Record of a buffer of a compiled program: its shape, bytes and source line."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A piece of a device's memory that a compiled program uses.

    Attributes:
        name: HLO instruction or argument whose value is in the buffer.
        shape: HLO shape on one device, such as "f32[8,128]{1,0:T(8,128)}".
        num_bytes: Size in memory, with padding.
        unpadded_bytes: Size of the elements.
        op_name: Path of the JAX operation, such as "jit(step)/while/body/dot_general"; empty if
            the compiler added the value.
        source: The user's line "file:line"; None if it is unknown.
        count: Number of values of this line that the sizes include; see `merge_lines`.
    """

    name: str
    shape: str
    num_bytes: int
    unpadded_bytes: int
    op_name: str
    source: str | None
    count: int = 1

    @property
    def padding_bytes(self) -> int:
        """Bytes that the tiling of the layout adds, such as T(8,128) to an array of 8 columns."""
        return self.num_bytes - self.unpadded_bytes


def merge_lines(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Returns one buffer for each source line, largest first.

    It has the sizes of all values of this line, and the shape of the largest. The layers of an
    unrolled model would otherwise fill a list.
    """
    groups: dict[str, list[Buffer]] = {}
    for buffer in buffers:
        groups.setdefault(buffer.source or buffer.name, []).append(buffer)
    merged = [
        dataclasses.replace(
            max(group, key=lambda buffer: buffer.num_bytes),
            num_bytes=sum(buffer.num_bytes for buffer in group),
            unpadded_bytes=sum(buffer.unpadded_bytes for buffer in group),
            count=sum(buffer.count for buffer in group),
        )
        for group in groups.values()
    ]
    return sorted(merged, key=lambda buffer: -buffer.num_bytes)
