"""The values that stay in the on-chip memory (VMEM) of a device, and never move to HBM."""

from tpudist.planner.roofline.sharded_value import Buffer

# Of one core: jax/_src/tpu_info.py. A kernel or a fusion gets 16 MiB of it, unless an option of the
# compiler changes that (`xla_tpu_scoped_vmem_limit_kib`), so earlier chips have no more.
_MIB = 2**20
_CAPACITY = {"v5e": 128 * _MIB, "v5p": 64 * _MIB, "v6e": 128 * _MIB, "tpu7x": 64 * _MIB}
_SCOPED = 16 * _MIB


class OnChipMemory:
    """The values in VMEM while a block runs, the least recently used first.

    XLA keeps a value in VMEM from its first to its last use if there is room
    (`memory_space_assignment`). Here a new value displaces the least recently used
    values.

    Attributes:
        capacity: Bytes for values.
        holds_all: Whether all values of the block are here, because those of its loop fit.
        hidden_bytes: Bytes that HBM wrote while a product computed the values.
        spared_bytes: Memory in HBM that the values would have if they were not here.
    """

    def __init__(self, generation: str):
        self.capacity = max(0, _CAPACITY.get(generation, 0) - _SCOPED)
        self.holds_all = False
        self._used = self.hidden_bytes = self.spared_bytes = 0.0
        # Bytes that HBM lacks of each value, the part of them that HBM can write at no cost, and
        # the memory in HBM that the value does not need.
        self._values: dict[Buffer, tuple[float, float, float]] = {}

    def has(self, buffer: Buffer) -> bool:
        """Returns whether a value, or what it is a part of, is in VMEM; this is a use of it."""
        if buffer in self._values:
            self._values[buffer] = self._values.pop(buffer)
            return True
        if self.holds_all:
            return True
        return bool(buffer.parents) and all(map(self.has, buffer.parents))

    def spares(self, buffer: Buffer) -> bool:
        """Returns whether a value needs no memory in HBM."""
        return self._values.get(buffer, (0.0, 0.0, 0.0))[2] > 0

    def has_room(self, num_bytes: float) -> bool:
        """Returns whether a value fits if all others leave."""
        return self.holds_all or num_bytes <= self.capacity

    def keep(self, buffer: Buffer, unwritten: float = 0.0, hidden: float = 0.0) -> float:
        """Puts a value into VMEM if it fits; returns the bytes that are written for it.

        Args:
            buffer: The value.
            unwritten: Bytes that are not in HBM.
            hidden: Part of them that HBM can write while a product computes the value.
        """
        if self.holds_all:
            return 0.0
        if not self.has_room(buffer.num_bytes):
            return unwritten
        self.forget(buffer)
        spared = min(unwritten, buffer.live_bytes)
        self._values[buffer] = unwritten, hidden, spared
        self._used += buffer.num_bytes
        self.spared_bytes += spared
        written = 0.0
        while self._used > self.capacity:
            written += self.remove(next(iter(self._values)))
        return written

    def replace(self, buffer: Buffer, by: Buffer) -> float:
        """Puts a value into the place of another one; returns the bytes that are written for it."""
        if buffer not in self._values:
            return 0.0
        unwritten, hidden, _ = self._values[buffer]
        self.forget(buffer)
        return self.keep(by, by.num_bytes if unwritten else 0.0, hidden)

    def remove(self, buffer: Buffer) -> float:
        """Moves a value to HBM; returns the bytes that are written for it."""
        unwritten, hidden, _ = self._values.get(buffer, (0.0, 0.0, 0.0))
        self.forget(buffer)
        self.hidden_bytes += min(unwritten, hidden)
        return max(0.0, unwritten - hidden)

    def remove_all(self) -> float:
        """Moves all values to HBM; returns the bytes that are written for them."""
        return sum(map(self.remove, list(self._values)))

    def forget(self, buffer: Buffer) -> None:
        """Removes a value that is no longer needed."""
        found = self._values.pop(buffer, None)
        if found is not None:
            self._used -= buffer.num_bytes
            self.spared_bytes -= found[2]
