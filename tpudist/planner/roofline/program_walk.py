"""Walks a program under given shardings: the time and the memory of one device, without compiling.

The rules, fixed before any comparison with compiled programs:

1. Operations on elements, and changes of layout, are fused into the operations that read them. They
   cost what they read, and their operations on the vector units, which hide as in compiled programs
   (rule 3 of `instruction_time`). A value with several users is written first if that is less to
   read. A loop shares the pass of an earlier loop over the same value, or of the product that wrote
   it, unless it needs a value from after that pass (multi-output fusion). The product hides its
   operations, and the bytes that HBM can move meanwhile. A loop also contains the next loop over
   what it writes. Operands and results of convolutions have the padding of their tiles
   (`fills_lanes`). A value that stays on the chip costs no bytes of HBM (`on_chip_memory`), also
   in a loop if all its values fit.
2. A product (matrix multiplication, convolution, kernel) takes its operations at the rate of large
   products and the share of the matrix unit that it fills, or its bytes at the rate of HBM. The
   last operation on elements is part of it. Products of vectors are operations on elements.
   Gathers and scatters take the cycles of `scheduled_cycles`. Each operation adds what it adds
   without cycles (rules 6 and 7 of `instruction_time`).
3. An operand that is split over an axis which the product does not sum or keep is gathered; a
   gathered value is used again in the same block. Devices add up sums over an axis with an
   all-reduce, or with a reduce-scatter where each needs only its part
   (`Network.scatters_sums`). It runs where the product is; over replicas it runs once, where the
   state changes. Operations with the same scalar operand and shape are split alike (`hints.link`).
   Slices of a split dim stay split. Values that are joined along a split dim stay split, too. The
   devices exchange parts (`HandleSlice` of XLA's `spmd_partitioner.cc`; programs of libtpu 0.0.50).
   An all-reduce of a scatter that a loop only adds up runs once, after the loop.
4. Gathers run in parallel with earlier products of their block on chips that do so: there the next
   operand is gathered meanwhile, so the first one of a loop's body is waited for. A `ppermute`
   starts when its operand exists, and runs in parallel with the products until its result is read.
   Everything else is waited for, too. Sums of less than 1 MiB in a block start together, unless
   one needs the result of another.
5. Memory contains the arguments, each value in HBM until its last use, and the results of loops.
   An operation on elements writes into an operand of the same size that nothing else needs
   (`CanShareOperandBufferWithUser` of XLA). The body of a loop adds its own peak, unless all its
   values stay on the chip.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tpudist.array_types import Shape
from tpudist.planner.roofline import hints
from tpudist.planner.roofline.operation_blocks import Array, Operation
from tpudist.planner.roofline.product_rules import ProductRules
from tpudist.planner.roofline.sharded_value import Axes, Value, fit, unsplit
from tpudist.programs.jaxpr_structure import Cond, Kernel, Scan, While

_ALL_REDUCES = frozenset("psum psum_invariant pmax pmin".split())
_COLLECTIVES = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


class Walk(ProductRules):
    """The walk over one block, with the rules of the operations."""

    def apply(self, operation: Operation) -> list[Value]:
        """Returns the results of an operation, and adds its cost."""
        structure, name = operation.structure, operation.name
        if isinstance(structure, Scan):
            return self._scan(operation, structure)
        if isinstance(structure, Kernel):
            return self.kernel(operation, structure)
        if name == "shard_map" and operation.bodies:
            return self._shard_map(operation)
        if isinstance(structure, Cond | While):
            return self._branch(operation)
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self, operation)
        if name in hints.ELEMENTWISE:
            return self.elementwise(operation)
        return self._unknown(operation)

    scales: dict[Shape, float] | None = None
    """Elements of an array per element of the trace, by shape; only in a `shard_map`."""

    def _inner(self, operation: Operation, which: int, depth: int) -> "Walk":
        body = Walk(operation.bodies[which], self.network, self.traced, self.lazy, depth)
        body.scales = self.scales
        body._on_chip.holds_all = self._on_chip.holds_all
        return body

    def _scan(self, operation: Operation, loop: Scan) -> list[Value]:
        values = [self._in_memory(i) for i in operation.inputs]
        first = loop.num_consts + loop.num_carry
        consts, carry = values[: loop.num_consts], values[loop.num_consts : first]
        rows = []
        for value in values[first:]:
            whole = self.reshard(value, ((), *value.axes[1:])) if value.axes[0] else value
            row = dataclasses.replace(
                whole, shape=whole.shape[1:], axes=whole.axes[1:], origin=None, is_single=False
            )
            rows.append(self.part(whole, row) if whole.reads else row)
        wanted = [self.wanted[i] for i in operation.outputs]
        requests = [*wanted[: loop.num_carry], *(x and x[1:] for x in wanted[loop.num_carry :])]
        for i, axes in enumerate(wanted[: loop.num_carry]):
            carry[i] = carry[i] if axes is None else self.reshard(carry[i], axes)
        body, outputs = self._run_loop_body(operation, consts, carry, rows, requests)
        found = [x.axes for x in outputs[: loop.num_carry]]
        if found != [x.axes for x in carry]:
            # The carry is split as the body leaves it.
            requests[: loop.num_carry] = found
            carry = [self.reshard(x, axes) for x, axes in zip(carry, found, strict=True)]
            body, outputs = self._run_loop_body(operation, consts, carry, rows, requests)
        arrays = self.arrays(operation)[loop.num_carry :]
        stacked = [
            dataclasses.replace(x, shape=(loop.length, *x.shape), axes=((), *x.axes), origin=None)
            for x in outputs[loop.num_carry :]
        ]
        on_device = sum(
            x.num_bytes for x, a in zip(stacked, arrays, strict=True) if not a.is_on_host
        )
        # The loop writes each row of a stack into it, and reads broadcast values from nothing.
        inputs = frozenset().union(*(x.reads for x in values))
        num_bytes = sum(x.num_bytes for x in inputs) + on_device + body.cost.total_bytes
        num_bytes -= on_device / loop.length
        is_on_chip = self._on_chip.holds_all or num_bytes <= self._on_chip.capacity
        if is_on_chip and not self._on_chip.holds_all:
            self._spend(self._read(inputs, is_loop=False))
            body, outputs = self._run_loop_body(operation, consts, carry, rows, requests, True)
        elif not is_on_chip:
            self.leave_chip()
        self.wait()
        if not is_on_chip:
            self.mark_peak(on_device + body.cost.peak_bytes)
        self.cost.add(body.cost, loop.length)
        results = [self.new_value(x) for x in outputs[: loop.num_carry]]
        results += [
            self.new_value(x, is_live=not a.is_on_host)
            for x, a in zip(stacked, arrays, strict=True)
        ]
        if is_on_chip:
            for buffer in itertools.chain.from_iterable(x.reads for x in results):
                self._spend_bytes(self._on_chip.keep(buffer, buffer.num_bytes))
        return results

    def _run_loop_body(
        self,
        operation: Operation,
        consts: list[Value],
        carry: list[Value],
        rows: list[Value],
        requests: Sequence[Axes | None],
        is_on_chip: bool = False,
    ) -> tuple["Walk", list[Value]]:
        body = self._inner(operation, 0, self.depth + 1)
        body._on_chip.holds_all |= is_on_chip
        in_place = [True] * len(carry)
        return body, body.run([*consts, *carry, *rows], requests, in_place)

    def _in_memory(self, number: int) -> Value:
        value = self.value(number)
        if value.reads and self.is_fused(value):
            value = self.write(value)
            self.replace(number, value)
        return value

    def _branch(self, operation: Operation) -> list[Value]:
        """Runs a loop of unknown length once, or the slowest branch."""
        values = self.operands(operation)
        self.leave_chip()
        self.wait()
        structure, slowest = operation.structure, None
        outputs: list[Value] = []
        inputs = values[1:] if isinstance(structure, Cond) else values
        if isinstance(structure, While):
            inputs = values[structure.num_cond_consts :]
        for which in range(len(operation.bodies)):
            body = self._inner(operation, which, self.depth + 1)
            results = body.run(inputs, [None] * len(operation.outputs))
            if slowest is None or body.cost.seconds > slowest.seconds:
                slowest, outputs = body.cost, results
        if slowest is not None:
            self.mark_peak(slowest.peak_bytes)
            self.cost.add(slowest, 1)
        return [self.new_value(x) for x in outputs]

    def _shard_map(self, operation: Operation) -> list[Value]:
        params, body_block = operation.eqn.params, operation.bodies[0]
        inputs, sizes = [], []
        for value, number, spec, inner in zip(
            self.operands(operation),
            operation.inputs,
            params["in_specs"],
            body_block.inputs,
            strict=True,
        ):
            moved = self.reshard(value, self._axes_of_spec(spec, self.block.arrays[number]))
            part = body_block.arrays[inner]
            sizes.append(math.prod(moved.shape))
            inputs.append(
                Value(part.shape, unsplit(len(part.shape)), part.item_bytes, reads=moved.reads)
            )
        results, traced = [], 0.0
        for array, spec, inner in zip(
            self.arrays(operation), params["out_specs"], body_block.outputs, strict=True
        ):
            part = body_block.arrays[inner]
            traced += math.prod(part.shape) * part.item_bytes
            results.append(self.local(array, self._axes_of_spec(spec, array)))
        self.leave_chip()
        self.wait()
        # The body has the shapes of a device of the trace; its work follows its results, and its
        # communication the shapes of the operands.
        share = sum(x.num_bytes for x in results) / traced if traced else 1.0
        body = self._inner(operation, 0, self.depth + 1)
        body.scales = collections.defaultdict(lambda: share)
        for value, size in zip(inputs, sizes, strict=True):
            body.scales.setdefault(value.shape, size / max(1, math.prod(value.shape)))
        body.run(inputs, [None] * len(operation.outputs))
        self.mark_peak(share * body.cost.peak_bytes)
        self.cost.add(body.cost, 1, share)
        return [self.new_value(x) for x in results]

    def _axes_of_spec(self, spec: Any, array: Array) -> Axes:
        names = hints.axes_of_spec(spec, len(array.shape))
        return fit(array.shape, names, self.sizes, self.traced)

    def _collective(self, operation: Operation) -> list[Value]:
        params = operation.eqn.params
        axes = params.get("axes", params.get("axis_name", ()))
        names = frozenset([axes] if isinstance(axes, str) else [str(x) for x in axes])
        kind = _COLLECTIVES.get(operation.name, "all-reduce")
        devices = math.prod(self.sizes.get(name, 1) for name in names)
        traced = math.prod(self.traced.get(name, 1) for name in names)
        results = []
        for value, array in zip(self.operands(operation), self.arrays(operation), strict=True):
            result = self.local(array, unsplit(len(array.shape)))
            num_bytes = value.num_bytes * (self.scales[value.shape] if self.scales else 1.0)
            if kind in ("all-gather", "reduce-scatter") and self.scales:
                grows = devices / traced if kind == "all-gather" else traced / devices
                self.scales[array.shape] = grows * self.scales[value.shape]
            if kind == "all-gather":
                num_bytes *= devices
            elif kind == "all-reduce":
                result = dataclasses.replace(value, origin=None)
            if kind == "collective-permute" and devices > 1:
                seconds = self.network.seconds(kind, num_bytes, names)
                results.append(self.send(value, result, seconds))
                continue
            self.wait(value.reads)
            self.communicate(kind, num_bytes, names)
            results.append(self.new_value(result))
        return results


_Rule = Callable[[Walk, Operation], list[Value]]
_RULES: dict[str, _Rule] = {
    "sharding_constraint": Walk._constraint,
    "optimization_barrier": Walk._barrier,
    "transpose": Walk._transpose,
    "reshape": Walk._reshape,
    "squeeze": Walk._reshape,
    "expand_dims": Walk._reshape,
    "broadcast_in_dim": Walk._broadcast,
    "iota": Walk._broadcast,
    "rev": Walk._part,
    "slice": Walk._part,
    "split": Walk._part,
    "dynamic_slice": Walk._part,
    "unstack": Walk._unstack,
    "dynamic_update_slice": Walk._update,
    "scatter": Walk._update,
    "scatter-add": Walk._update,
    "device_put": Walk._memory_kind,
    "concatenate": Walk._concatenate,
    "stack": Walk._concatenate,
    "gather": Walk._gather,
    "dot_general": Walk._dot,
    "conv_general_dilated": Walk._convolution,
    "ragged_dot_general": Walk._group_product,
    **dict.fromkeys(
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split(),
        Walk._reduce,
    ),
    **dict.fromkeys((*_ALL_REDUCES, *_COLLECTIVES), Walk._collective),
}
