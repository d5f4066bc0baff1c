"""Record of a buffer of a compiled program: its shape, bytes and source line."""

import dataclasses


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
    """

    name: str
    shape: str
    num_bytes: int
    unpadded_bytes: int
    op_name: str
    source: str | None

    @property
    def padding_bytes(self) -> int:
        """Bytes that the tiling of the layout adds, such as T(8,128) to an array of 8 columns."""
        return self.num_bytes - self.unpadded_bytes
