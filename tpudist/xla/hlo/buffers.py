"""What one buffer of a compiled program is: its shape, its bytes and the line that asked for it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A piece of a device's memory that a compiled program holds.

    Attributes:
        name: The HLO instruction or the argument whose value it holds.
        shape: The HLO shape on one device, such as "f32[8,128]{1,0:T(8,128)}".
        num_bytes: Its size in memory, with padding.
        unpadded_bytes: The size of its elements.
        op_name: The path of the JAX operation, such as "jit(step)/while/body/dot_general"; empty
            for what the compiler added by itself.
        source: The user's line "file:line", or None where the compiler does not say.
    """

    name: str
    shape: str
    num_bytes: int
    unpadded_bytes: int
    op_name: str
    source: str | None

    @property
    def padding_bytes(self) -> int:
        """What the layout's tiling adds, such as T(8,128) to an array of 8 columns."""
        return self.num_bytes - self.unpadded_bytes
