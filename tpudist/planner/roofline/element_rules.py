"""Rules of operations on elements, changes of layout, and operations that only move bytes."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from operator import mul

from tpudist.planner.roofline import hints
from tpudist.planner.roofline.operation_blocks import Array, Operation
from tpudist.planner.roofline.sharded_value import (
    Axes,
    Value,
    Work,
    names_in,
    num_parts,
    reshape_axes,
    resize,
    unsplit,
)
from tpudist.planner.roofline.walk_state import WalkState
from tpudist.programs import elementwise
from tpudist.xla.estimate import scheduled_cycles

# Operations on elements through which the sum over replicas may wait.
_LINEAR = frozenset(
    "add add_any sub neg mul div select_n convert_element_type copy reduce_precision".split()
)
_SLICES = ("slice", "split")


class ElementRules(WalkState):
    """Rules of operations without products."""

    def arrays(self, operation: Operation) -> list[Array]:
        """Returns the complete shapes of the results."""
        return [self.block.arrays[i] for i in operation.outputs]

    def elementwise(self, operation: Operation) -> list[Value]:
        """Applies an operation that computes each element from those at the same place."""
        arrays = self.arrays(operation)
        addends = [self.value(i).partial & self.lazy for i in operation.inputs]
        adds = operation.name in ("add", "add_any") and addends[0] == addends[-1]
        waits = self.depth > 0 or len(operation.inputs) == 1 or adds
        values = self.operands(operation, keep_lazy=waits and operation.name in _LINEAR)
        pending = [v.partial - self.lazy for v in values]
        if any(x != pending[0] for x in pending):
            values = [
                self.sum(v, self.wanted[i]) for v, i in zip(values, operation.inputs, strict=True)
            ]
        results = []
        for number, array in zip(operation.outputs, arrays, strict=True):
            shapes = [self.block.arrays[i].shape for i in operation.inputs]
            same = [len(shape) == len(array.shape) for shape in shapes]
            full = [v for v, shape in zip(values, shapes, strict=True) if shape == array.shape]
            if not full:  # all operands are repeated along a dim
                full = [v for v, fits in zip(values, same, strict=True) if fits]
            own = self._join(full, array, self.wanted[number])
            axes = hints.link(self.block, operation, own, self.links)
            self.is_relinked |= axes != own
            result = self.local(array, axes)
            moved = [
                self.reshard(v, _where_whole(axes, shape, array.shape)) if fits else v
                for v, shape, fits in zip(values, shapes, same, strict=True)
            ]
            # Its shape may have parts that no axis names.
            alike = [
                v.shape for v, shape in zip(moved, shapes, strict=True) if shape == array.shape
            ]
            result.shape = tuple(map(min, zip(*alike, strict=True))) if alike else result.shape
            result.reads = frozenset().union(*(v.reads for v in moved))
            result.work = frozenset().union(*(v.work for v in moved))
            if operation.name not in elementwise.FREE:
                result.work |= {Work(math.prod(result.shape))}
            result.partial = frozenset().union(*(v.partial for v in moved))
            result.partial -= names_in(axes)
            result.is_single = all(v.is_single for v in moved)
            if len(values) == 1:
                result.origin = values[0].origin
            if result.partial - self.lazy and number not in self.block.added:
                result = self.sum(self.write(result), self.wanted[number])
            results.append(result)
        return results

    def _join(self, values: Sequence[Value], array: Array, wanted: Axes | None) -> Axes:
        """Returns the axes of an operation on elements: those of its largest operands first."""
        found: list[tuple[str, ...]] = [()] * len(array.shape)
        taken: set[str] = set()
        ordered = sorted(values, key=lambda v: (not v.reads, -v.num_bytes * self._parts(v.axes)))
        if wanted is not None and any(v.axes == wanted for v in ordered if v.reads):
            return wanted
        for value in ordered:
            for dim, names in enumerate(value.axes):
                if not found[dim] and not taken & set(names):
                    found[dim] = names
                    taken |= set(names)
        return tuple(found)

    def _parts(self, axes: Axes) -> int:
        return math.prod(num_parts(names, self.sizes) for names in axes)

    def _constraint(self, operation: Operation) -> list[Value]:
        (value,) = self.operands(operation, keep_lazy=self.depth > 0)
        (array,) = self.arrays(operation)
        axes = hints.axes_of_constraint(operation, array.shape, value.axes, self.sizes, self.traced)
        return [self.reshard(value, axes)]

    def _barrier(self, operation: Operation) -> list[Value]:
        return self.operands(operation, keep_lazy=True)

    def _layout(
        self, operation: Operation, axes: Axes, shape: tuple[int, ...], value: Value | None = None
    ) -> list[Value]:
        if value is None:
            value = self.value(operation.inputs[0])
        return [dataclasses.replace(value, axes=axes, shape=shape)]

    def _transpose(self, operation: Operation) -> list[Value]:
        value, order = self.value(operation.inputs[0]), operation.eqn.params["permutation"]
        return self._layout(
            operation, tuple(value.axes[i] for i in order), tuple(value.shape[i] for i in order)
        )

    def _reshape(self, operation: Operation) -> list[Value]:
        value = self.value(operation.inputs[0])
        sizes = self.sizes, self.traced
        before = resize(self.block.arrays[operation.inputs[0]].shape, value.axes, *sizes)
        (array,) = self.arrays(operation)
        # A dim that begins with a dim of the operand may have one element per device of its axes.
        starts = dict(
            zip(itertools.accumulate(before, initial=1, func=mul), value.axes, strict=False)
        )
        after, offset, begun = array.shape, 1, unsplit(len(array.shape))
        for dim in range(len(after)):
            begun = (*begun[:dim], starts.get(offset, ()), *begun[dim + 1 :])
            after = resize(array.shape, begun, *sizes)
            offset *= after[dim]
        axes, shape = reshape_axes(before, after, value, self.sizes)
        lost = names_in(value.axes) - names_in(axes)
        if lost:
            kept = tuple(tuple(n for n in names if n not in lost) for names in value.axes)
            value = self.reshard(value, kept)
            axes, shape = reshape_axes(before, after, value, self.sizes)
        return self._layout(operation, axes, shape, value)

    def _broadcast(self, operation: Operation) -> list[Value]:
        (array,) = self.arrays(operation)
        if not operation.inputs:
            return [self.local(array, unsplit(len(array.shape)))]
        value, dims = self.value(operation.inputs[0]), operation.eqn.params["broadcast_dimensions"]
        axes, shape = list(unsplit(len(array.shape))), list(array.shape)
        for dim, names, size in zip(dims, value.axes, value.shape, strict=True):
            axes[dim] = names
            shape[dim] = size if names or size > 1 else array.shape[dim]
        # A request splits the new dims at no cost.
        wanted = self.wanted[operation.outputs[0]]
        taken = names_in(tuple(axes))
        for dim, names in enumerate(wanted or ()):
            if dim not in dims and not taken & set(names):
                axes[dim], shape[dim] = names, -(-array.shape[dim] // num_parts(names, self.sizes))
        return self._layout(operation, tuple(axes), tuple(shape), value)

    def _part(self, operation: Operation) -> list[Value]:
        """Applies an operation whose result has a part of the operand, such as a slice."""
        before = self.block.arrays[operation.inputs[0]].shape
        arrays = self.arrays(operation)
        if operation.name in _SLICES:
            value = self.value(operation.inputs[0])
            changed = {i for a in arrays for i, size in enumerate(a.shape) if size != before[i]}
            counts = {i: num_parts(value.axes[i], self.sizes) for i in changed}
            if all(a.shape[i] % count == 0 for a in arrays for i, count in counts.items()):
                return [self._slice(value, array, counts) for array in arrays]
        value = self._whole_where_changed(operation)
        results = []
        for array in arrays:
            axes, shape = _keep_dims(value, before, array)
            result = dataclasses.replace(value, axes=axes, shape=shape, origin=None)
            results.append(self.part(value, result) if value.reads else result)
        return results

    def _slice(self, value: Value, array: Array, counts: dict[int, int]) -> Value:
        """Returns a slice that is split like its operand; the devices exchange its parts."""
        sizes = enumerate(value.shape)
        shape = tuple(array.shape[i] // counts[i] if i in counts else size for i, size in sizes)
        result = dataclasses.replace(value, shape=shape, origin=None)
        if not value.reads:
            return result
        result = self.part(value, result)
        names = frozenset(name for i in counts for name in value.axes[i])
        if not names:
            return result
        self.communicate("collective-permute", result.num_bytes, names)
        return self.new_value(result)

    def _whole_where_changed(self, operation: Operation) -> Value:
        """Returns the operand, gathered along dims whose size the operation changes."""
        value, before = self.value(operation.inputs[0]), self.block.arrays[operation.inputs[0]]
        (array, *_) = self.arrays(operation)
        if len(array.shape) != len(before.shape):
            return value
        sizes = zip(before.shape, array.shape, value.axes, strict=True)
        return self.reshard(value, tuple(names if a == b else () for a, b, names in sizes))

    def _unstack(self, operation: Operation) -> list[Value]:
        axis = operation.eqn.params.get("axis", 0)
        value = self.value(operation.inputs[0])
        value = self.reshard(value, _without(value.axes, {axis}))
        dims = [i for i in range(len(value.shape)) if i != axis]
        part = dataclasses.replace(
            value,
            axes=tuple(value.axes[i] for i in dims),
            shape=tuple(value.shape[i] for i in dims),
            origin=None,
        )
        return [self.part(value, part) if value.reads else part for _ in operation.outputs]

    def _update(self, operation: Operation) -> list[Value]:
        """Applies an operation that overwrites a part of its first operand in place."""
        value, update = (self.value(i) for i in operation.inputs[:2])
        partial: set[str] = set()
        cycles = 0.0
        if operation.name.startswith("scatter"):
            value, update, partial = self._place_scatter(operation)
            window_dims = operation.eqn.params["dimension_numbers"].update_window_dims
            window = math.prod(update.shape[i] for i in window_dims)
            num_updates = math.prod(update.shape) / max(1, window)
            cycles = scheduled_cycles.scatter_cycles(num_updates, window)
        if self.is_fused(value):
            value = self.write(value)
        before_s = self.cost.compute_s
        self.overwrite(value, update)
        self.extend(before_s, cycles)
        result = dataclasses.replace(value, origin=None, partial=value.partial | partial)
        if partial:
            number = operation.outputs[0]
            is_once = self.depth > 0 and number in self.block.accumulated
            result = self.sum(result, self.wanted[number], is_once=is_once)
        return [result]

    def _place_scatter(self, operation: Operation) -> tuple[Value, Value, set[str]]:
        """Returns the operand and the updates of a scatter, and the axes over which it is a sum.

        If only the indices are split, and by all axes, each device adds its updates to zeros, and
        the results are added up, however large they are (`PartitionScatter` in XLA's
        `gather_scatter_handler.cc`, and programs of libtpu 0.0.50). Else each device gets the
        updates of its part of the operand.
        """
        value, places, update = (self.value(i) for i in operation.inputs)
        whole, _, updates = (self.block.arrays[i].shape for i in operation.inputs)
        if not value.reads and not any(value.axes):  # zeros, for example
            value = self.reshard(value, self._axes_of_addend(operation.outputs[0]))
        numbers = operation.eqn.params["dimension_numbers"]
        single = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        dims = [i for i in range(len(whole)) if i not in single]
        batch = [i for i in range(len(updates)) if i not in numbers.update_window_dims]
        pairs = [*zip(numbers.update_window_dims, dims, strict=True)]
        indices = (batch[i] for i in numbers.scatter_indices_batching_dims)
        pairs += zip(indices, numbers.operand_batching_dims, strict=True)
        axes, taken = list(value.axes), names_in(value.axes)
        own_axes = dict(enumerate(update.axes))
        for i in numbers.scatter_indices_batching_dims:  # the updates may repeat a constant
            own_axes[batch[i]] = own_axes[batch[i]] or places.axes[i]
        for own, dim in pairs:
            if updates[own] == whole[dim] and not axes[dim]:
                axes[dim] = tuple(name for name in own_axes[own] if name not in taken)
                taken |= {*axes[dim]}
        rows = {name for i in batch for name in update.axes[i]} | self.lazy
        others = [name for name, size in self.sizes.items() if size > 1 and name not in rows]
        is_split = any(axes[i] for i in range(len(whole)) if i not in [dim for _, dim in pairs])
        adds = operation.name == "scatter-add" and not is_split and not others
        target = [
            tuple(name for name in names if name not in taken and (adds or name in self.lazy))
            for names in update.axes
        ]
        for own, dim in pairs:
            target[own] = axes[dim] if updates[own] == whole[dim] else ()
        partial = {name for i in batch for name in target[i]} - taken
        return self.reshard(value, tuple(axes)), self.reshard(update, tuple(target)), partial

    def _axes_of_addend(self, number: int) -> Axes:
        """Returns the axes of the value that another one is added to, if it exists by then.

        The gradient of logits is an example: XLA splits that of the label's logit as the others.
        """
        if number in self.block.added:
            add = next(x for x in self.block.operations if number in x.inputs)
            for other in add.inputs:
                if other != number and (value := self.values[other]) is not None:
                    return value.axes
        return unsplit(len(self.block.arrays[number].shape))

    def _memory_kind(self, operation: Operation) -> list[Value]:
        results = []
        for value, number, array in zip(
            self.operands(operation), operation.inputs, self.arrays(operation), strict=True
        ):
            if array.is_on_host != self.block.arrays[number].is_on_host:
                self.cost.exposed_s += self.network.host_seconds(value.num_bytes)
                moved = self.new_value(value, is_live=not array.is_on_host)
                results.append(moved)
            else:
                results.append(value)
        return results

    # Operations that read and write memory.

    def _unknown(self, operation: Operation) -> list[Value]:
        values = self.operands(operation)
        results = []
        pairs = list(zip(operation.inputs, values, strict=True))
        for array in self.arrays(operation):
            axes = unsplit(len(array.shape))
            for number, value in pairs:
                if len(value.shape) == len(axes):
                    axes, _ = _keep_dims(value, self.block.arrays[number].shape, array)
                    break
            results.append(self.read_and_write(values, self.local(array, axes), moves=True))
            values = []  # one operation reads them once
        return results

    def _reduce(self, operation: Operation) -> list[Value]:
        values = self.operands(operation, keep_lazy=self.depth > 0)
        dims = operation.eqn.params.get("axes", operation.eqn.params.get("dimensions", ()))
        results = []
        for value, number in zip(values, operation.outputs, strict=False):
            kept = [i for i in range(len(value.shape)) if i not in dims]
            partial = {name for i in dims for name in value.axes[i]}
            result = Value(
                tuple(value.shape[i] for i in kept),
                tuple(value.axes[i] for i in kept),
                self.block.arrays[number].item_bytes,
                value.partial | partial,
            )
            result = self.read_and_write([value], result, num_ops=math.prod(value.shape))
            results.append(self.sum(result, self.wanted[number]))
        return results

    def _concatenate(self, operation: Operation) -> list[Value]:
        (array,) = self.arrays(operation)
        values = self.operands(operation, keep_lazy=True)
        if len({v.partial for v in values}) > 1:
            values = self.operands(operation)
        dim = operation.eqn.params.get("dimension", operation.eqn.params.get("axis", 0))
        is_stack = len(values[0].shape) < len(array.shape)
        largest = max(values, key=lambda v: v.num_bytes)
        axes = largest.axes if is_stack else _without(largest.axes, {dim})
        names = () if is_stack else largest.axes[dim]
        if names and all(v.axes == largest.axes for v in values):
            # XLA splits another dim, concatenates, and splits this dim again.
            axes = largest.axes
            for value in (*values, self.local(array, axes)):
                self.communicate("all-to-all", value.num_bytes, frozenset(names))
        moved = [self.reshard(v, axes) for v in values]
        if is_stack:
            axes = (*axes[:dim], (), *axes[dim:])
        result = self.local(array, axes)
        result.partial = frozenset().union(*(v.partial for v in values))
        return [self.read_and_write(moved, result)]

    def _gather(self, operation: Operation) -> list[Value]:
        table, indices = self.operands(operation)
        (array,), params = self.arrays(operation), operation.eqn.params
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        axes = list(unsplit(len(array.shape)))
        batch = [i for i in range(len(array.shape)) if i not in numbers.offset_dims]
        single = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        dims = [i for i in range(len(table.shape)) if i not in single]
        whole = self.block.arrays[operation.inputs[0]].shape
        splits = [
            (out, table.axes[dim])
            for out, dim in zip(numbers.offset_dims, dims, strict=False)
            if sizes[dim] == whole[dim]
        ]
        # The larger operand decides.
        place = len(splits) if table.num_bytes > indices.num_bytes else 0
        splits[place:place] = zip(batch, indices.axes, strict=False)
        taken: set[str] = set()
        for out, names in splits:
            axes[out] = tuple(name for name in names if name not in taken)
            taken |= {*names}
        # Devices with a part of the rows add up what they find.
        rows = {n for d in numbers.collapsed_slice_dims for n in table.axes[d]} - taken
        keep = names_in(tuple(axes)) | rows
        table = self.reshard(table, tuple(tuple(n for n in x if n in keep) for x in table.axes))
        result = self.local(array, tuple(axes))
        result.partial = frozenset(rows)
        before_s = self.cost.compute_s
        found = self.read_and_write([self.part(table, result), indices], result, moves=True)
        size = math.prod(result.shape[i] for i in numbers.offset_dims)
        num_slices = math.prod(result.shape) / max(1, size)
        self.extend(before_s, scheduled_cycles.gather_cycles(num_slices, size))
        return [self.sum(found, self.wanted[operation.outputs[0]])]


def _keep_dims(value: Value, before: Sequence[int], array: Array) -> tuple[Axes, tuple[int, ...]]:
    """Returns the axes and local shape of a result that changes the size of some dims."""
    if len(before) != len(array.shape):
        return unsplit(len(array.shape)), array.shape
    same = [a == b for a, b in zip(before, array.shape, strict=True)]
    axes = tuple(names if kept else () for kept, names in zip(same, value.axes, strict=True))
    sizes = zip(same, value.shape, array.shape, strict=True)
    return axes, tuple(local if kept else size for kept, local, size in sizes)


def _where_whole(axes: Axes, shape: Sequence[int], full: Sequence[int]) -> Axes:
    """Returns the axes of an operand whose dims of size 1 are repeated."""
    dims = zip(axes, shape, full, strict=True)
    return tuple(names if size == whole else () for names, size, whole in dims)


def _without(axes: Axes, dims: set[int]) -> Axes:
    return tuple(() if i in dims else names for i, names in enumerate(axes))
