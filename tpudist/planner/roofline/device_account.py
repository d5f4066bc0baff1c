"""The time and the memory of one device during a walk over a program."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from tpudist.planner.roofline.network import Network
from tpudist.planner.roofline.on_chip_memory import OnChipMemory
from tpudist.planner.roofline.sharded_value import CLOCK, Buffer, Value


@dataclasses.dataclass
class Cost:
    """The cost of a block on one device.

    Attributes:
        compute_s: Seconds of products and of reading and writing.
        slack_s: Seconds of products that the next gather can run in parallel with.
        exposed_s: Seconds of communication that is waited for.
        flops: Operations of products.
        hbm_bytes: Bytes to and from HBM.
        peak_bytes: Memory at the peak, without the inputs.
        sums: Bytes of small sums, by their axes and the number of sums before them.
    """

    compute_s: float = 0.0
    slack_s: float = 0.0
    exposed_s: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    peak_bytes: float = 0.0
    sums: dict[tuple[frozenset[str], int], float] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of the block."""
        return self.compute_s + self.exposed_s

    def add(self, inner: "Cost", times: float, share: float = 1.0) -> None:
        """Adds a block that runs `times` times, and computes on a share of its traced arrays."""
        self.compute_s += times * share * inner.compute_s
        self.exposed_s += times * inner.exposed_s
        self.slack_s = 0.0
        self.flops += times * share * inner.flops
        self.hbm_bytes += times * share * inner.hbm_bytes


class DeviceAccount:
    """The time, the bytes to and from HBM, and the memory of one device.

    Attributes:
        network: Devices and prices.
        cost: Cost so far.
    """

    def __init__(self, network: Network):
        self.network = network
        self.cost = Cost()
        self._live_bytes = 0.0
        self._made: list[Buffer] = []  # by the current operation
        self._on_chip = OnChipMemory(network.chip.generation)
        self._products_s = 0.0  # so far
        self._written_at: dict[Buffer, float] = {}  # by `_products_s`
        self._sent: dict[Buffer, tuple[float, float]] = {}

    # Memory.

    def is_fused(self, value: Value) -> bool:
        """Returns whether a value is computed where it is read, and not in memory."""
        return len(value.reads) != 1 or next(iter(value.reads)).num_bytes != value.num_bytes

    def new_value(self, like: Value, *, is_product: bool = False, is_live: bool = True) -> Value:
        """Returns a value in a buffer of its own."""
        num_bytes = like.num_bytes
        live = num_bytes if is_live else 0.0
        self._live_bytes += live
        buffer = Buffer(num_bytes, is_product, live_bytes=live)
        self._made.append(buffer)
        self._written_at[buffer] = self._products_s
        reads = frozenset((buffer,))
        return dataclasses.replace(like, reads=reads, is_single=True)

    def part(self, value: Value, like: Value) -> Value:
        """Returns a part of a value, which reads only its own bytes."""
        for buffer in value.reads:
            buffer.users += 1
        view = Buffer(like.num_bytes, parents=tuple(value.reads))
        return dataclasses.replace(like, reads=frozenset((view,)))

    def _free(self, buffer: Buffer) -> None:
        self._live_bytes -= buffer.live_bytes
        buffer.live_bytes = 0.0
        self._on_chip.forget(buffer)
        for parent in buffer.parents:
            parent.users -= 1
            if not parent.users:
                self._free(parent)

    def mark_peak(self, extra: float = 0.0) -> None:
        """Notes the memory in use, with `extra` bytes."""
        self.cost.peak_bytes = max(self.cost.peak_bytes, self._live_bytes + extra)

    # Bytes and operations.

    def _spend_bytes(self, num_bytes: float, *, moves: bool = False) -> None:
        seconds_of = self.network.move_seconds if moves else self.network.loop_seconds
        self.cost.hbm_bytes += num_bytes
        self.cost.compute_s += seconds_of(num_bytes)

    def _read(self, sources: Iterable[Buffer], *, is_loop: bool = True) -> float:
        """Returns the bytes that an operation reads from HBM.

        A loop over elements shares the pass of an earlier one, or of the product that wrote the
        value, if all that it reads existed then.
        """
        ordered = sorted(sources, key=lambda x: x.number)
        self.wait(ordered)
        newest = ordered[-1].number if ordered else 0
        tick = next(CLOCK)
        num_bytes = 0.0
        for buffer in ordered:
            if self._on_chip.has(buffer) or (is_loop and buffer.last_pass > newest):
                continue
            num_bytes += buffer.num_bytes
            if is_loop:
                buffer.last_pass = tick
            num_bytes += self._on_chip.keep(buffer)
        return num_bytes

    def spend_product(self, seconds: float, flops: float, num_bytes: float) -> None:
        """Adds a product."""
        self.cost.compute_s += seconds
        self.cost.slack_s += seconds
        self._products_s += seconds
        self.cost.flops += flops
        self.cost.hbm_bytes += num_bytes

    def leave_chip(self) -> None:
        """Moves all values to HBM."""
        self._spend_bytes(self._on_chip.remove_all())

    # Transfers that run in parallel with products.

    def send(self, value: Value, result: Value, seconds: float) -> Value:
        """Returns the result of a transfer, which starts as soon as the value exists."""
        self.wait(value.reads)
        received = self.new_value(result)
        ready = max((self._written_at.get(x, 0.0) for x in value.reads), default=0.0)
        for buffer in received.reads:
            self._sent[buffer] = seconds, ready
        return received

    def wait(self, buffers: Iterable[Buffer] | None = None) -> None:
        """Waits for the transfers of buffers, or of all."""
        for buffer in list(self._sent) if buffers is None else buffers:
            seconds, ready = self._sent.pop(buffer, (0.0, 0.0))
            hidden = min(seconds, self.cost.slack_s, self._products_s - ready)
            self.cost.slack_s -= hidden
            self.cost.exposed_s += seconds - hidden

    def read_and_write(
        self, values: Sequence[Value], result: Value, *, moves: bool = False
    ) -> Value:
        """Returns the result of an operation that is bound by memory.

        Args:
            values: The operands.
            result: Shape of the result.
            moves: Whether it moves elements to other places.
        """
        num_bytes = self._read(frozenset().union(*(value.reads for value in values)))
        written = self.new_value(result)
        num_bytes += sum(self._on_chip.keep(x, x.num_bytes) for x in written.reads)
        self._spend_bytes(num_bytes, moves=moves)
        return written

    def overwrite(self, value: Value, update: Value) -> None:
        """Writes an update into a value, which keeps its place."""
        num_bytes = self._read(update.reads)
        is_on_chip = all(map(self._on_chip.has, value.reads))
        self._spend_bytes(num_bytes + (0.0 if is_on_chip else update.num_bytes))

    def write_product(
        self,
        flops: float,
        seconds_of: Callable[[float], float],
        values: Sequence[Value],
        result: Value,
        *,
        is_live: bool = True,
    ) -> Value:
        """Returns the result of a product.

        Args:
            flops: Number of operations.
            seconds_of: Returns its time for a number of bytes to and from HBM.
            values: The operands.
            result: Shape of the result.
            is_live: Whether the result has memory of its own.
        """
        num_read = self._read(frozenset().union(*(v.reads for v in values)), is_loop=False)
        stays = self._on_chip.has_room(result.num_bytes)
        num_bytes = num_read + (0.0 if stays else result.num_bytes)
        seconds = seconds_of(num_bytes)
        self.spend_product(seconds, flops, num_bytes)
        written = self.new_value(result, is_product=True, is_live=is_live)
        (buffer,) = written.reads
        buffer.last_pass = next(CLOCK)
        if stays:
            hidden = seconds * self.network.rates.hbm_bytes_per_s - num_read
            self._spend_bytes(self._on_chip.keep(buffer, buffer.num_bytes, hidden))
        return written

    def write(self, value: Value) -> Value:
        """Computes a fused value into memory."""
        # The last operation on the result of a product is part of the product, which wrote it.
        merged = [x for x in value.reads if x.is_product] if value.is_single else []
        num_bytes = self._read(value.reads.difference(merged))
        result = self.new_value(value)
        (written,) = result.reads
        if merged:
            num_bytes += self._on_chip.replace(merged[0], written)
        else:
            num_bytes += self._on_chip.keep(written, written.num_bytes)
        self._spend_bytes(num_bytes)
        for buffer in merged:
            self._free(buffer)
        return result
