"""The state of a walk over a program: values on one device, their memory, and the time so far."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from tpudist.planner.roofline import hints
from tpudist.planner.roofline.device_account import DeviceAccount
from tpudist.planner.roofline.network import Network
from tpudist.planner.roofline.operation_blocks import Array, Block, Operation
from tpudist.planner.roofline.sharded_value import (
    Axes,
    Buffer,
    Sizes,
    Value,
    Work,
    local_shape,
    names_in,
    num_parts,
    unsplit,
)

_SMALL_SUM = 2**20  # bytes (rule 4)
_MIN_SAVING = 1.5  # rule 1: sources of a value with several users over its own bytes


class WalkState(DeviceAccount):
    """The walk over one block; `program_walk.Walk` has the rules of the operations.

    Attributes:
        block: The program.
        network: Devices and prices.
        traced: Sizes of the mesh axes in the trace.
        lazy: Axes of replicas, over which only the state is summed.
        depth: Number of loops around the block.
        values: The values so far, by number.
        wanted: Axes that the users of each value ask for.
        links: Axes of the arrays that repeat a scalar.
        is_relinked: Whether such an array changed the axes of an operation.
        cost: Cost so far.
    """

    def __init__(
        self,
        block: Block,
        network: Network,
        traced: Sizes,
        lazy: frozenset[str],
        depth: int = 0,
        links: hints.Links | None = None,
    ):
        super().__init__(network)
        self.block, self.traced = block, traced
        self.sizes, self.lazy, self.depth = network.sizes, lazy, depth
        self.values: list[Value | None] = [None] * len(block.arrays)
        self.wanted: list[Axes | None] = []
        self.links: hints.Links = links or {}
        self.is_relinked = False
        self._gathered: dict[Any, Value] = {}
        self._num_sums = 0  # before the current operation

    def run(
        self,
        inputs: Sequence[Value],
        wanted: Sequence[Axes | None],
        in_place: Sequence[bool] = (),
    ) -> list[Value]:
        """Returns the outputs, and sets `cost`.

        Args:
            inputs: The inputs.
            wanted: Axes that each output should have; None to leave it as it is.
            in_place: Whether each output replaces an input.
        """
        block = self.block
        self.wanted = hints.find(block, wanted, self.sizes, self.traced, self.links)
        for number, value in zip(block.inputs, inputs, strict=True):
            self._store(number, value)
        for number in block.constants:
            array = block.arrays[number]
            shape = array.shape
            constant = Value(shape, unsplit(len(shape)), array.item_bytes, is_state=True)
            self._store(number, constant)
        for operation in block.operations:
            self._num_sums = max((self.value(i).num_sums for i in operation.inputs), default=0)
            results = self.apply(operation)
            self._num_sums = max((self.value(i).num_sums for i in operation.inputs), default=0)
            is_state = all(self.value(i).is_state for i in operation.inputs)
            for number, value in zip(operation.outputs, results, strict=True):
                value.is_state = is_state
                value.num_sums = max(value.num_sums, self._num_sums)
                self._store(number, value)
            self.end_operation(operation.last_uses)
        return self._finish(wanted, in_place)

    @abc.abstractmethod
    def apply(self, operation: Operation) -> list[Value]:
        """Returns the results of an operation, and adds its cost."""

    def _finish(self, wanted: Sequence[Axes | None], in_place: Sequence[bool]) -> list[Value]:
        outputs = []
        for number, axes in zip(self.block.outputs, wanted, strict=True):
            value = self.value(number)
            if value.partial - self.lazy or (value.partial and not self.depth):
                value = self.sum(value, axes, everything=not self.depth)
            if axes is not None:
                value = self.reshard(value, axes)
            outputs.append(value)
        # One loop over the elements writes them all, and reads each operand once.
        sources: set[Buffer] = set()
        work: set[Work] = set()
        num_bytes = 0.0
        for i, value in enumerate(outputs):
            keeps = not (i < len(in_place) and in_place[i])
            if self.is_fused(value) and not self.is_in_product(value):
                sources |= value.reads
                work |= value.work
                outputs[i] = self.new_value(value, is_live=keeps)
                num_bytes += value.num_bytes
                continue
            if self.is_fused(value):
                value = outputs[i] = self.write(value, is_live=keeps)
            num_bytes += sum(map(self._on_chip.remove, value.reads))
        traffic = self._read(sources, work)
        traffic.hbm_bytes += num_bytes
        self._spend(traffic)
        self.wait()
        self.cost.hbm_bytes += self._on_chip.hidden_bytes
        self.mark_peak()
        for (axes, _), num_bytes in self.cost.sums.items():
            self.cost.exposed_s += self.network.seconds("all-reduce", num_bytes, axes)
        return outputs

    # Values.

    def value(self, number: int) -> Value:
        """Returns a value by its number."""
        value = self.values[number]
        assert value is not None, number
        return value

    def _store(self, number: int, value: Value) -> None:
        uses = self.block.num_uses[number]
        if uses > 1 and self.is_fused(value) and value.read_bytes > _MIN_SAVING * value.num_bytes:
            value = self.write(value)
        elif uses > 1 and value.is_single:
            value = dataclasses.replace(value, is_single=False)
        if value.origin is None:
            value.origin = value
        self.replace(number, value)

    def replace(self, number: int, value: Value) -> None:
        """Sets a value, which keeps its buffers alive."""
        for buffer in value.reads:
            buffer.users += 1
        before, self.values[number] = self.values[number], value
        if before is not None:
            self._release(before)

    def drop(self, number: int) -> None:
        """Ends a value that no later operation uses."""
        value, self.values[number] = self.values[number], None
        if value is not None:
            self._release(value)

    def _release(self, value: Value) -> None:
        for buffer in value.reads:
            buffer.users -= 1
            if not buffer.users:
                self._free(buffer)

    def communicate(
        self,
        kind: str,
        num_bytes: float,
        axes: frozenset[str],
        num_sums: int = 0,
        *,
        is_once: bool = False,
    ) -> None:
        """Adds a collective along axes, after a number of small sums, or once after the loop."""
        axes = frozenset(name for name in axes if self.sizes.get(name, 1) > 1)
        if not axes:
            return
        if kind == "all-reduce" and (num_bytes < _SMALL_SUM or axes <= self.lazy):
            key = axes, 0 if axes <= self.lazy else num_sums
            self.cost.sums[key] = self.cost.sums.get(key, 0.0) + num_bytes
            return
        seconds = self.network.seconds(kind, num_bytes, axes)
        if is_once:
            self.cost.after_s += seconds
            return
        if kind == "all-gather" and self.network.hides_gathers:
            hidden = min(seconds, self.cost.slack_s)
            self.cost.slack_s -= hidden
            seconds -= hidden
        self.cost.exposed_s += seconds

    # Shardings.

    def sum(
        self,
        value: Value,
        target: Axes | None,
        *,
        everything: bool = False,
        is_once: bool = False,
    ) -> Value:
        """Returns a value whose devices have added up their addends, split as in `target`.

        Args:
            value: The addends.
            target: Axes of the result.
            everything: Whether to add over replicas, too.
            is_once: Whether the value is only added to another one in each round of a loop. XLA
                moves an all-reduce of it after the loop (`while_loop_all_reduce_code_motion.cc`).
        """
        axes = value.partial if everything else value.partial - self.lazy
        if not axes:
            return value
        wanted = target or value.axes
        shape, split = list(value.shape), list(value.axes)
        for dim, names in enumerate(wanted):
            for name in names:
                if name in axes and name not in names_in(tuple(split)):
                    if shape[dim] % self.sizes[name] == 0:
                        shape[dim] //= self.sizes[name]
                        split[dim] += (name,)
        num_sums = max(value.num_sums, self._num_sums)
        summed = Value(tuple(shape), tuple(split), value.item_bytes, value.partial - axes)
        summed.num_sums = num_sums + 1
        # Over slices and replicas, only the part is summed that a device keeps.
        inner = frozenset(axes - self.lazy)
        kept = inner & names_in(summed.axes) - names_in(value.axes)
        if kept and self.network.scatters_sums(inner):
            self.communicate("reduce-scatter", value.num_bytes, kept)
            self.communicate("all-reduce", summed.num_bytes, inner - kept, num_sums)
        else:
            self.communicate("all-reduce", value.num_bytes, inner, num_sums, is_once=is_once)
        self.communicate("all-reduce", summed.num_bytes, frozenset(axes & self.lazy))
        result = self.new_value(summed)
        for buffer in value.reads:  # the sum of a new value takes its memory
            if not buffer.users:
                if len(value.reads) == 1:
                    self._spend_bytes(self._on_chip.replace(buffer, *result.reads))
                self._free(buffer)
        return result

    def reshard(self, value: Value, target: Axes) -> Value:
        """Returns a value with other axes: gathered, sliced or exchanged."""
        if value.axes == target:
            return value
        have, want = names_in(value.axes), names_in(target)
        place = {name: dim for dim, names in enumerate(target) for name in names}
        moved = {
            name
            for dim, names in enumerate(value.axes)
            for name in names
            if name in want and place[name] != dim
        }
        whole = [
            size * num_parts(names, self.sizes)
            for size, names in zip(value.shape, value.axes, strict=True)
        ]
        shape = local_shape(whole, target, self.sizes)
        result = dataclasses.replace(value, shape=shape, axes=target)
        lost = frozenset(have - want)
        if not lost and not moved:
            # Each device keeps its own slice.
            if not value.reads:
                return result
            part = self.part(value, result)
            if value.read_bytes <= result.num_bytes:
                return part  # computed where it is read
            return self.read_and_write([part], part)
        key = (value.origin, target, value.item_bytes)
        found = self._gathered.get(key)
        if found is not None:
            return dataclasses.replace(found, origin=value.origin)
        if moved:
            self._exchange(value, result, moved)
        if lost:
            self.communicate("all-gather", result.num_bytes, lost)
        gathered = self.new_value(result)
        if not value.partial:
            self._gathered[key] = gathered
        return gathered

    def _exchange(self, value: Value, result: Value, moved: set[str]) -> None:
        """Adds the exchange of a value whose dims are split by other axes than before."""
        num_bytes, axes = max(value.num_bytes, result.num_bytes), frozenset(moved)
        dims = {dim for dim, names in enumerate(value.axes) if moved & {*names}}
        if len(dims) == 1:
            self.communicate("all-to-all", num_bytes, axes)
            self._spend_bytes(2 * num_bytes, moves=True)  # a copy puts the parts in order
            return
        # Two dims swap their axes: the devices of equal parts swap their values. If one axis is
        # larger, its rest moves by an all-to-all, and the parts move once more.
        self.communicate("collective-permute", num_bytes, axes)
        if value.shape != result.shape:
            larger = max(moved, key=lambda name: self.sizes[name])
            self.communicate("all-to-all", num_bytes, frozenset((larger,)))
            self.communicate("collective-permute", num_bytes, axes)

    def local(self, array: Array, axes: Axes) -> Value:
        """Returns a value of this shape with axes; it reads nothing."""
        shape = local_shape(array.shape, axes, self.sizes)
        return Value(shape, axes, array.bytes_per_element(shape))

    def operands(self, operation: Operation, *, keep_lazy: bool = False) -> list[Value]:
        """Returns the operands, which are summed over replicas unless `keep_lazy`."""
        found = []
        for number in operation.inputs:
            value = self.value(number)
            if value.partial and not keep_lazy and self.wanted[number] is not None:
                value = self.sum(value, self.wanted[number], everything=True)
                self.replace(number, value)
            found.append(value)
        return found
