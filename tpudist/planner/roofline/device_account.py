"""The time and the memory of one device during a walk over a program."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from tpudist.planner.roofline.network import Network
from tpudist.planner.roofline.on_chip_memory import OnChipMemory
from tpudist.planner.roofline.sharded_value import CLOCK, Buffer, Value, Work


@dataclasses.dataclass
class Traffic:
    """The work of a loop over elements.

    Attributes:
        hbm_bytes: Bytes to and from HBM.
        vmem_bytes: Bytes to and from the on-chip memory.
        num_ops: Operations on the vector units.
    """

    hbm_bytes: float = 0.0
    vmem_bytes: float = 0.0
    num_ops: float = 0.0


@dataclasses.dataclass
class Cost:
    """The cost of a block on one device.

    Attributes:
        compute_s: Seconds of products and of reading and writing.
        slack_s: Seconds of products that the next gather can run in parallel with.
        exposed_s: Seconds of communication that is waited for.
        after_s: The same after the loop whose body this is.
        flops: Operations of products.
        hbm_bytes: Bytes to and from HBM.
        peak_bytes: Memory of HBM at the peak, without the inputs.
        total_bytes: The same with the values in the on-chip memory.
        sums: Bytes of small sums, by their axes and the number of sums before them.
    """

    compute_s: float = 0.0
    slack_s: float = 0.0
    exposed_s: float = 0.0
    after_s: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    peak_bytes: float = 0.0
    total_bytes: float = 0.0
    sums: dict[tuple[frozenset[str], int], float] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of the block."""
        return self.compute_s + self.exposed_s

    def add(self, inner: "Cost", times: float, share: float = 1.0) -> None:
        """Adds a block that runs `times` times, and computes on a share of its traced arrays."""
        self.compute_s += times * share * inner.compute_s
        self.exposed_s += times * inner.exposed_s + inner.after_s
        self.slack_s = 0.0
        self.flops += times * share * inner.flops
        self.hbm_bytes += times * share * inner.hbm_bytes


class DeviceAccount(abc.ABC):
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
        # Buffers that it computes elements into, with the operands whose memory they may take.
        self._replaced: list[tuple[Buffer, list[Buffer]]] = []
        self._on_chip = OnChipMemory(network.chip.generation)
        self._products_s = 0.0  # so far
        self._written_at: dict[Buffer, float] = {}  # by `_products_s`
        self._sent: dict[Buffer, tuple[float, float]] = {}

    # Memory.

    @abc.abstractmethod
    def drop(self, number: int) -> None:
        """Ends a value that no later operation uses."""

    def is_fused(self, value: Value) -> bool:
        """Returns whether a value is computed where it is read, and not in memory."""
        if value.work or len(value.reads) != 1:
            return True
        return next(iter(value.reads)).num_bytes != value.num_bytes

    def is_in_product(self, value: Value) -> bool:
        """Returns whether a fused value is the last operation on the result of a product."""
        return value.is_single and any(x.is_product for x in value.reads)

    def new_value(self, like: Value, *, is_product: bool = False, is_live: bool = True) -> Value:
        """Returns a value in a buffer of its own."""
        num_bytes = like.num_bytes
        live = num_bytes if is_live else 0.0
        self._live_bytes += live
        buffer = Buffer(num_bytes, is_product, live_bytes=live)
        self._made.append(buffer)
        self._written_at[buffer] = self._products_s
        reads = frozenset((buffer,))
        return dataclasses.replace(like, reads=reads, work=frozenset(), is_single=True)

    def part(self, value: Value, like: Value) -> Value:
        """Returns a part of a value, which reads only its own bytes."""
        for buffer in value.reads:
            buffer.users += 1
        share = like.num_bytes / value.num_bytes if value.num_bytes else 0.0
        # A fused value may read other bytes than it has: those of another dtype, or of less rows.
        is_stored = value.read_bytes == value.num_bytes
        view_bytes = like.num_bytes if is_stored else share * value.read_bytes
        view = Buffer(view_bytes, parents=tuple(value.reads))
        work = frozenset(Work(share * x.num_ops) for x in value.work)
        return dataclasses.replace(like, reads=frozenset((view,)), work=work)

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
        self._mark(self._live_bytes + extra, self._on_chip.spared_bytes)

    def _mark(self, total: float, spared: float) -> None:
        self.cost.total_bytes = max(self.cost.total_bytes, total)
        self.cost.peak_bytes = max(self.cost.peak_bytes, total - spared)

    def end_operation(self, last_uses: Iterable[int]) -> None:
        """Ends the values that an operation is the last one to use, and notes its memory."""
        live, spared = self._live_bytes, self._on_chip.spared_bytes
        for number in last_uses:
            self.drop(number)
        for buffer in self._made:  # operands that only this operation needed
            if not buffer.users:
                self._free(buffer)
        self._made.clear()
        taken: set[Buffer] = set()
        for written, operands in self._replaced:
            free = (x for x in operands if not x.users and x not in taken)
            taken |= {next(free, written)} - {written}
        self._replaced.clear()
        self._mark(live - sum(x.num_bytes for x in taken), spared)

    # Bytes and operations.

    def _spend(self, traffic: Traffic, *, moves: bool = False) -> None:
        """Adds a loop over elements, which may move them to other places."""
        rates, num_bytes = self.network.rates, traffic.hbm_bytes
        self.cost.hbm_bytes += num_bytes
        num_ops = 0.0 if moves else traffic.num_ops
        units = rates.unit_seconds(num_bytes, traffic.vmem_bytes, num_ops)
        self.cost.compute_s += rates.loop_seconds(*units, moves=moves, uses_hbm=num_bytes > 0)

    def extend(self, before_s: float, cycles: float) -> None:
        """Makes the operation that began at `before_s` of computing last at least `cycles`."""
        least_s = before_s + cycles / self.network.chip.cycles_per_s
        self.cost.compute_s = max(self.cost.compute_s, least_s)

    def _spend_bytes(self, num_bytes: float, *, moves: bool = False) -> None:
        self._spend(Traffic(num_bytes), moves=moves)

    def _read(
        self, sources: Iterable[Buffer], work: Iterable[Work] = (), *, is_loop: bool = True
    ) -> Traffic:
        """Returns what an operation reads, and the operations that it does.

        A loop over elements shares the pass of an earlier one, or of the product that wrote the
        value, if all that it reads existed then. The product hides its operations, and its bytes
        while it multiplies.
        """
        ordered = sorted(sources, key=lambda x: x.number)
        self.wait(ordered)
        newest = ordered[-1].number if ordered else 0
        tick = next(CLOCK)
        traffic = Traffic()
        products: list[Buffer] = []
        for buffer in ordered:
            is_on_chip = self._on_chip.has(buffer)
            if is_loop and buffer.last_pass > newest:
                products += [buffer] if buffer.is_product else []
                continue
            if is_loop:
                buffer.last_pass = tick
            if is_on_chip:
                traffic.vmem_bytes += buffer.num_bytes
            else:
                traffic.hbm_bytes += buffer.num_bytes + self._on_chip.keep(buffer)
        for part in work:
            if is_loop and not products and part.last_pass <= newest:
                part.last_pass = tick
                traffic.num_ops += part.num_ops
        self._hide(traffic, products)
        return traffic

    def _hide(self, traffic: Traffic, products: Iterable[Buffer]) -> None:
        """Moves bytes while products multiply."""
        for buffer in products:
            hidden = min(buffer.spare_bytes, traffic.hbm_bytes)
            buffer.spare_bytes -= hidden
            traffic.hbm_bytes -= hidden
            self.cost.hbm_bytes += hidden

    def _keep(self, traffic: Traffic, buffer: Buffer) -> None:
        """Writes a result to VMEM, or to HBM if it does not fit."""
        traffic.hbm_bytes += self._on_chip.keep(buffer, buffer.num_bytes)
        if self._on_chip.has(buffer):
            traffic.vmem_bytes += buffer.num_bytes

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
        self, values: Sequence[Value], result: Value, *, moves: bool = False, num_ops: float = 0.0
    ) -> Value:
        """Returns the result of an operation without products.

        Args:
            values: The operands.
            result: Shape of the result.
            moves: Whether it moves elements to other places.
            num_ops: Number of its operations.
        """
        work = frozenset().union(*(value.work for value in values), (Work(num_ops),))
        traffic = self._read(frozenset().union(*(value.reads for value in values)), work)
        written = self.new_value(result)
        for buffer in written.reads:
            self._keep(traffic, buffer)
        self._spend(traffic, moves=moves)
        return written

    def overwrite(self, value: Value, update: Value) -> None:
        """Writes an update into a value, which keeps its place."""
        traffic = self._read(update.reads, update.work)
        if all(map(self._on_chip.has, value.reads)):
            traffic.vmem_bytes += update.num_bytes
        else:
            traffic.hbm_bytes += update.num_bytes
        self._spend(traffic)

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
        sources = frozenset().union(*(v.reads for v in values))
        num_read = self._read(sources, is_loop=False).hbm_bytes
        stays = self._on_chip.has_room(result.num_bytes)
        num_bytes = num_read + (0.0 if stays else result.num_bytes)
        seconds = seconds_of(num_bytes)
        self.spend_product(seconds, flops, num_bytes)
        written = self.new_value(result, is_product=True, is_live=is_live)
        (buffer,) = written.reads
        buffer.last_pass = next(CLOCK)
        hidden = seconds * self.network.rates.hbm_bytes_per_s - num_read
        buffer.spare_bytes = max(0.0, hidden - result.num_bytes)
        if stays:
            self._spend_bytes(self._on_chip.keep(buffer, buffer.num_bytes, hidden))
        return written

    def write(self, value: Value, *, is_live: bool = True) -> Value:
        """Computes a fused value into memory."""
        # The last operation on the result of a product is part of the product, which wrote it.
        merged = [x for x in value.reads if x.is_product] if self.is_in_product(value) else []
        traffic = self._read(value.reads.difference(merged), () if merged else value.work)
        result = self.new_value(value, is_live=is_live)
        (written,) = result.reads
        alike = [x for x in value.reads if x.live_bytes == written.live_bytes > 0]
        alike = [x for x in alike if x not in merged and not self._on_chip.spares(x)]
        self._replaced.append((written, alike))
        if merged:
            traffic.hbm_bytes += self._on_chip.replace(merged[0], written)
            self._hide(traffic, merged)
        else:
            self._keep(traffic, written)
        self._spend(traffic)
        written.last_pass = next(CLOCK)  # a loop over the result is part of this one
        for buffer in merged:
            self._free(buffer)
        return result
