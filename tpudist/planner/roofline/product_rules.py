"""Rules of products: matrix multiplications, convolutions and kernels."""

import dataclasses
import functools
import math
from collections.abc import Sequence

from tpudist.planner import model_flops
from tpudist.planner.roofline import kernel_work
from tpudist.planner.roofline.element_rules import ElementRules
from tpudist.planner.roofline.operation_blocks import Array, Operation
from tpudist.planner.roofline.sharded_value import (
    Axes,
    Value,
    fills_lanes,
    num_parts,
    unsplit,
)
from tpudist.programs.jaxpr_structure import Kernel
from tpudist.xla.estimate import kernels
from tpudist.xla.estimate.convolutions import share_of_window
from tpudist.xla.hardware import chips

_SUBLANES = 8
_PASSES = {"HIGH": 3.0, "HIGHEST": 6.0}  # of bfloat16 for a product of float32


@dataclasses.dataclass
class _Product:
    """The dims of a product: pairs of dims of the operands, and their dims in the result.

    Attributes:
        batch: Triples of a dim of the left operand, of the right one, and of the result.
        summed: Pairs of dims.
        left: Pairs of a dim of the left operand and of the result.
        right: Pairs of a dim of the right operand and of the result.
    """

    batch: list[tuple[int, int, int]]
    summed: list[tuple[int, int]]
    left: list[tuple[int, int]]
    right: list[tuple[int, int]]


class ProductRules(ElementRules):
    """Rules of products, in addition to those without."""

    def _dot(self, operation: Operation) -> list[Value]:
        (left_sum, right_sum), (left_batch, right_batch) = operation.eqn.params["dimension_numbers"]
        ranks = [len(self.block.arrays[i].shape) for i in operation.inputs]
        left = [i for i in range(ranks[0]) if i not in (*left_sum, *left_batch)]
        right = [i for i in range(ranks[1]) if i not in (*right_sum, *right_batch)]
        first = len(left_batch)
        product = _Product(
            [(a, b, i) for i, (a, b) in enumerate(zip(left_batch, right_batch, strict=True))],
            list(zip(left_sum, right_sum, strict=True)),
            [(dim, first + i) for i, dim in enumerate(left)],
            [(dim, first + len(left) + i) for i, dim in enumerate(right)],
        )
        return [self._multiply(operation, product)]

    def _convolution(self, operation: Operation) -> list[Value]:
        numbers = operation.eqn.params["dimension_numbers"]
        left, right, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
        groups = operation.eqn.params["feature_group_count"]
        groups *= operation.eqn.params["batch_group_count"]
        product = _Product(
            [],
            [(left[1], right[1])] if groups == 1 else [],
            [(left[0], out[0])],
            [(right[0], out[1])] if groups == 1 else [],
        )
        return [self._multiply(operation, product)]

    def _group_product(self, operation: Operation) -> list[Value]:
        """Applies a product of rows with the matrices of their groups."""
        numbers = operation.eqn.params["ragged_dot_dimension_numbers"]
        (left_sum, right_sum), _ = numbers.dot_dimension_numbers
        arrays = [self.block.arrays[i] for i in operation.inputs[:2]]
        groups = [*numbers.rhs_group_dimensions]
        left = [i for i in range(len(arrays[0].shape)) if i not in left_sum]
        right = [i for i in range(len(arrays[1].shape)) if i not in (*right_sum, *groups)]
        sums_rows = {*numbers.lhs_ragged_dimensions} <= {*left_sum}
        first = len(left) + sums_rows
        product = _Product(
            [],
            list(zip(left_sum, right_sum, strict=True)),
            [(dim, sums_rows + i) for i, dim in enumerate(left)],
            [(dim, first + i) for i, dim in enumerate(right)],
        )
        return [self._multiply(operation, product)]

    def _multiply(self, operation: Operation, product: _Product) -> Value:
        left, right, *others = self.operands(operation)
        number = operation.outputs[0]
        array = self.block.arrays[number]
        left, right, axes, partial = self._place_product(
            left, right, product, array, self.wanted[number]
        )
        if self._swaps_operands(operation, left, right):
            right = self.read_and_write([right], right, moves=True)
        shape = list(self.local(array, axes).shape)
        for dim, out in product.left:  # parts that no axis names
            shape[out] = left.shape[dim]
        for dim, out in product.right:
            shape[out] = right.shape[dim]
        for dim, _, out in product.batch:
            shape[out] = left.shape[dim]
        result = Value(tuple(shape), axes, array.bytes_per_element(tuple(shape)), partial)
        flops, share = self._product_flops(operation, product, left, right, result)
        kind = chips.kind_of_products(map(model_flops.bits_of, operation.eqn.invars[:2]))
        operands = left, right, *others
        if share:
            convolves = operation.name == "conv_general_dilated"
            seconds_of = functools.partial(
                self.network.product_seconds, flops, kind, share, convolves
            )
            is_live = number not in self.block.accumulated
            written = self.write_product(flops, seconds_of, operands, result, is_live=is_live)
        else:
            written = self.read_and_write(operands, result, num_ops=flops)
        # The addends of two products are added before their sum over devices.
        return written if number in self.block.added else self.sum(written, self.wanted[number])

    def _product_flops(
        self, operation: Operation, product: _Product, left: Value, right: Value, result: Value
    ) -> tuple[float, float]:
        """Returns the operations of a product, and the share of the matrix unit that it fills.

        The share is 0 if the vector units multiply.
        """
        if operation.name != "dot_general":
            traced = math.prod(self.block.arrays[operation.outputs[0]].shape)
            traced *= math.prod(
                self.block.arrays[operation.inputs[0]].shape[d] for d, _ in product.summed
            )
            own = math.prod(result.shape) * math.prod(left.shape[d] for d, _ in product.summed)
            flops = model_flops.PRODUCTS[operation.name](operation.eqn) * own / max(traced, 1)
            if operation.name != "conv_general_dilated":
                return flops, 1.0
            return flops, self._convolution_share(operation, left, right, result)
        rows = math.prod(left.shape[dim] for dim, _ in product.left)
        summed = math.prod(min(left.shape[a], right.shape[b]) for a, b in product.summed)
        columns = math.prod(right.shape[dim] for dim, _ in product.right)
        count = math.prod(left.shape[a] for a, _, _ in product.batch)
        flops = 2.0 * count * rows * summed * columns
        if summed == 1 or (count > 1 and 1 in (rows, columns)):
            return flops, 0.0  # XLA multiplies elements (`dot_strength_reduction`)
        precision = operation.eqn.params["precision"]
        is_wide = all(self.block.arrays[i].item_bytes >= 4 for i in operation.inputs)
        if precision and is_wide:
            flops *= _PASSES.get(getattr(precision[0], "name", str(precision[0])), 1.0)
        return flops, self.network.share_of_unit(rows, summed, columns)

    def _swaps_operands(self, operation: Operation, left: Value, right: Value) -> bool:
        """Returns whether XLA swaps the operands of a convolution (`conv_operand_swapper.cc`).

        It does so if the window has more positions than the image, as in the gradients of
        transposed convolutions. A pass of its own then reverses the larger operand.
        """
        if operation.name != "conv_general_dilated":
            return False
        numbers = operation.eqn.params["dimension_numbers"]
        image = math.prod(left.shape[i] for i in numbers.lhs_spec[2:])
        return math.prod(right.shape[i] for i in numbers.rhs_spec[2:]) > image

    def _convolution_share(
        self, operation: Operation, left: Value, right: Value, result: Value
    ) -> float:
        """Returns the share of the matrix unit that a convolution fills.

        A kernel that is gathered along its inputs or outputs has the other ones in its lanes
        (programs of libtpu 0.0.50). The same holds for its gradient, if each device needs a part
        of it, unless these are too few for lanes.
        """
        numbers, width = operation.eqn.params["dimension_numbers"], self.network.rates.unit_width
        out, kernel = numbers.out_spec, numbers.rhs_spec[0]
        columns, inputs, *window = (int(right.shape[i]) for i in numbers.rhs_spec)
        images, features, *positions = (int(result.shape[i]) for i in out)
        wanted = self.wanted[operation.outputs[0]] or result.axes
        of_images, of_features = (wanted[i] != result.axes[i] for i in out[:2])
        is_gradient = math.prod(window) > math.prod(positions)
        if self._swaps_operands(operation, left, right):
            columns, images, features = images, features, images
            of_images, of_features = of_features, of_images
            window = [int(left.shape[i]) for i in numbers.lhs_spec[2:]]
        in_lanes = images if fills_lanes(images, features) else 0
        if is_gradient:
            if of_images and features >= _SUBLANES:
                in_lanes = 0
            elif of_features and images >= _SUBLANES:
                in_lanes = images
            else:  # XLA may swap the operands
                columns, in_lanes = in_lanes or columns, 0
        elif not in_lanes and right.axes[kernel] != self.value(operation.inputs[1]).axes[kernel]:
            window = []  # a product for each position
        return share_of_window(window, inputs, columns, width, in_lanes)

    def _place_product(
        self, left: Value, right: Value, product: _Product, array: Array, wanted: Axes | None
    ) -> tuple[Value, Value, Axes, frozenset[str]]:
        """Returns the operands as the product needs them, the axes of its result and its sums."""
        # A place is a triple of dims: of the left operand, the right one, and the result.
        places: list[tuple[int | None, int | None, int | None]] = [
            *product.batch,
            *((a, b, None) for a, b in product.summed),
            *((dim, None, out) for dim, out in product.left),
            *((None, dim, out) for dim, out in product.right),
        ]
        split: dict[tuple, list[str]] = {place: [] for place in places}

        def find(axes: Axes | None, which: int, name: str) -> tuple | None:
            for place in places:
                dim = place[which]
                if axes is not None and dim is not None and name in axes[dim]:
                    return place
            return None

        names = [n for axes in (left.axes, right.axes, wanted or ()) for x in axes for n in x]
        # A sum over one axis includes others at no cost.
        is_summed = any(
            (place := find(left.axes, 0, name)) is not None
            and place[2] is None
            and place == find(right.axes, 1, name)
            for name in names
        )
        for name in dict.fromkeys(names):
            mine, other = find(left.axes, 0, name), find(right.axes, 1, name)
            request = find(wanted, 2, name)
            options = [place for place in (mine, other) if place is not None]
            chosen = options[0] if options else request
            if len(options) == 2 and mine != other:
                kept = [place for place in options if place == request]
                kept += [place for place in options if place[2] is not None]
                # The smaller operand is gathered, but weights rather than activations.
                rank_left = (not left.is_state, self._whole(left, name))
                rank_right = (not right.is_state, self._whole(right, name))
                larger = mine if rank_left >= rank_right else other
                chosen = kept[0] if kept and (kept[0] == request or len(kept) == 1) else larger
            elif len(options) == 1 and options[0][2] is None:
                # Each device adds up its part, because XLA splits the other operand, too. Only if
                # the result should be split, one operand may be gathered: what moves less.
                owner = left if mine is not None else right
                parts = math.prod(num_parts(x, self.sizes) for x in wanted or ()) or 1
                result = math.prod(array.shape) * array.item_bytes / parts
                is_less = request is not None and self._whole(owner, name) < 2 * result
                if is_less and not is_summed:
                    chosen = request
            if chosen is not None and self._divides(name, chosen, left, right, split[chosen]):
                split[chosen].append(name)
        axes: list[Axes] = []
        for which, rank in enumerate((len(left.shape), len(right.shape), len(array.shape))):
            dims: list[tuple[str, ...]] = [()] * rank
            for place, chosen in split.items():
                if (dim := place[which]) is not None:
                    dims[dim] = tuple(chosen)
            axes.append(tuple(dims))
        partial = frozenset(n for place, x in split.items() if place[2] is None for n in x)
        partial |= left.partial | right.partial
        return self.reshard(left, axes[0]), self.reshard(right, axes[1]), axes[2], partial

    def _whole(self, value: Value, name: str) -> float:
        """Returns the bytes of a value that is not split over an axis."""
        return value.num_bytes * self.sizes[name]

    def _divides(
        self, name: str, place: tuple, left: Value, right: Value, names: Sequence[str]
    ) -> bool:
        """Returns whether an axis splits a place evenly, or already does."""
        count = num_parts((*names, name), self.sizes)
        for value, dim in ((left, place[0]), (right, place[1])):
            if dim is not None and name not in value.axes[dim]:
                whole = value.shape[dim] * num_parts(value.axes[dim], self.sizes)
                if whole % count:
                    return False
        return True

    def kernel(self, operation: Operation, kernel: Kernel) -> list[Value]:
        """Applies a Pallas kernel, which runs on each device."""
        values = self.operands(operation)
        results = [self.local(x, unsplit(len(x.shape))) for x in self.arrays(operation)]
        inputs = [(str(x.aval.dtype), x.aval.shape) for x in operation.eqn.invars]
        outputs = [x.aval.shape for x in operation.eqn.outvars]
        params = operation.eqn.params
        name, attributes = str(params["name"]), str(params.get("metadata"))
        flops = kernels.attention_flops(name, inputs, outputs, attributes)
        share = kernels.attention_share(name, inputs, attributes, of_grid=True)
        if flops is None:
            flops = kernel.flops
        if flops is None:
            flops = model_flops.count(kernel.body) * share * math.prod(kernel.grid or ())
        self.leave_chip()
        sources = frozenset().union(*(v.reads for v in values))
        self.wait(sources)
        num_bytes = sum(x.num_bytes for x in sources) + sum(x.num_bytes for x in results)
        rates = self.network.rates
        floats = [shape for dtype, shape in inputs if "float" in dtype and len(shape) > 1]
        filled = min(1.0, floats[0][-1] / rates.unit_width) if floats else 1.0
        products_s = flops / rates.flops_per_s() / filled
        seconds = max(
            *rates.grid_seconds(kernel_work.body_of(kernel), products_s, share),
            num_bytes / rates.hbm_bytes_per_s,
        )
        self.spend_product(seconds, flops, num_bytes)
        return [self.new_value(x) for x in results]
