"""Reads the program inside a custom kernel (Pallas): its grid, its blocks, and its operations.

A compiled program contains the kernel as MLIR of Mosaic, in base64. The kernel runs once per step
of its grid; before a step, the blocks of the operands that it uses are copied to VMEM.
"""

import base64
import binascii
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Iterable, Mapping

from jax.experimental.mosaic.dialects import tpu
from jax.extend.mlir import ir
from jax.interpreters import mlir

from tpudist.xla.hlo import kernel_copies

_BODY = re.compile(r'"body":"([^"]+)"')
_CONTRACTED = re.compile(r"dot_dimension_numbers<\[([\d, ]*)\]")
_DYNAMIC = -(2**63)  # a size of the grid that is known only when the kernel runs
_VMEM = "vmem"
# Pallas writes the end of a loop as its start plus its length.
_SUMS = {"addi": operator.add, "subi": operator.sub}


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix multiplication in the body of a kernel, with `count` runs per step of the grid.

    Attributes:
        m: Rows of the result.
        k: Size of the summed dims.
        n: Columns of the result.
        dtypes: Names of the operands' types in MLIR, such as "bf16" or "i8".
        count: Runs per step of the grid.
    """

    m: int
    k: int
    n: int
    dtypes: tuple[str, ...]
    count: float = 1.0

    @property
    def flops(self) -> float:
        """Operations per step of the grid."""
        return 2.0 * self.m * self.k * self.n * self.count

    @property
    def bits(self) -> list[tuple[int, bool]]:
        """Bits of an element of each operand, and whether it is a float."""
        return [(_bits_of_name(name), not name.startswith("i")) for name in self.dtypes]


@dataclasses.dataclass(frozen=True)
class Block:
    """The part of an operand or a result that a step of the grid uses.

    Attributes:
        num_bytes: Size of the block.
        num_copies: Times that a run of the kernel copies it: once for each change of its place.
        in_vmem: Whether it is copied to VMEM; else the kernel copies its parts itself.
        copied_bytes: Bytes that the kernel copies itself from or to it; None if unknown.
        num_passes: Times that a run may copy each block, if its place is read from memory, such as
            the expert of some rows; None if it is computed.
    """

    num_bytes: float
    num_copies: float
    in_vmem: bool
    copied_bytes: float | None = None
    num_passes: float | None = None


@dataclasses.dataclass(frozen=True)
class KernelBody:
    """A kernel.

    Attributes:
        num_steps: Steps of its grid.
        products: Its matrix multiplications.
        vector_ops: Elementwise operations per step of the grid.
        num_prefetched: Number of operands in SMEM, which come before those with blocks.
        blocks: Blocks of its operands and results, in order.
        is_parallel: Whether the cores of a chip may share the steps.
        has_unknown_loops: Whether a step has loops of unknown length, which count once.
        num_waits: Times that the kernel waits for copies that it starts itself; None if unknown.
    """

    num_steps: float
    products: tuple[Product, ...]
    vector_ops: float
    num_prefetched: int
    blocks: tuple[Block, ...]
    is_parallel: bool = False
    has_unknown_loops: bool = False
    num_waits: int | None = 0

    @property
    def num_copying_steps(self) -> float:
        """Steps before which a block is copied, and waits for other copies."""
        copies = (block.num_copies for block in self.blocks if block.in_vmem)
        return max(copies, default=0.0) + (self.num_waits or 0)

    @property
    def flops(self) -> float:
        """Operations of the matrix multiplications of a run."""
        return self.num_steps * sum(product.flops for product in self.products)

    def share_of_unit(self, width: int) -> float:
        """Returns the share of a matrix unit of `width` x `width` that the products fill."""
        full = sum(product.flops for product in self.products)
        needed = sum(
            product.flops / min(1.0, product.k / width) / min(1.0, product.n / width)
            for product in self.products
        )
        return full / needed if needed else 1.0


def read(attributes: str) -> KernelBody | None:
    """Returns the body of a kernel; None if its grid is dynamic or another version wrote it.

    Args:
        attributes: Text of the attributes of the custom call.
    """
    match = _BODY.search(attributes)
    return _read_body(match[1]) if match else None


@functools.lru_cache(maxsize=256)
def _read_body(encoded: str) -> KernelBody | None:
    context = mlir.make_ir_context()
    tpu.register_dialect(context)
    # Serialized operations have a prefix that is not registered.
    context.allow_unregistered_dialects = True
    try:
        module = ir.Module.parse(base64.b64decode(encoded), context)
    except (ir.MLIRError, binascii.Error):
        return None
    with context:
        functions = {
            ir.StringAttr(operation.attributes["sym_name"]).value: operation
            for operation in _operations(module.operation)
            if "sym_name" in operation.attributes
        }
        main = next((f for f in functions.values() if "iteration_bounds" in f.attributes), None)
        if main is None:  # without a grid, the kernel is one step
            main = next(iter(functions.values()), None)
        return None if main is None else _read_main(main, functions)


def _read_main(main: ir.Operation, functions: dict[str, ir.Operation]) -> KernelBody | None:
    grid = _integers(main, "iteration_bounds")
    if _DYNAMIC in grid:
        return None
    num_prefetched = _integer(main, "scalar_prefetch")
    counter = _Counter()
    counter.count(main.regions[0].blocks[0], 1.0)
    copies = kernel_copies.count(main, grid, _bits_of_name)
    blocks, arguments = [], list(main.regions[0].blocks[0].arguments)[len(grid) + num_prefetched :]
    if "window_params" in main.attributes:
        windows = [ir.DictAttr(x) for x in ir.ArrayAttr(main.attributes["window_params"])]
    else:
        windows = [{}] * (len(arguments) - _integer(main, "scratch_operands"))
    # Scratch memory follows the operands and results.
    for argument, window in zip(arguments, windows, strict=False):
        block = _read_block(argument.type, window, grid, functions)
        if not block.in_vmem and copies is not None:
            copied = copies.num_bytes[argument.arg_number]
            block = dataclasses.replace(block, copied_bytes=copied)
        blocks.append(block)
    return KernelBody(
        float(math.prod(grid)),
        tuple(counter.products),
        counter.vector_ops,
        num_prefetched,
        tuple(blocks),
        "<parallel>" in str(main.attributes.get("dimension_semantics")),
        counter.has_unknown_loops,
        None if copies is None else copies.num_waits,
    )


def _read_block(
    memory: ir.Type,
    window: Mapping[str, ir.Attribute] | ir.DictAttr,
    grid: list[int],
    functions: dict[str, ir.Operation],
) -> Block:
    shaped = ir.MemRefType(memory)
    transform = None
    if "transform_indices" in window:
        transform = functions.get(str(window["transform_indices"]).removeprefix("@"))
    num_copies, num_passes = 1.0, None
    if transform is not None:
        # The grid runs in order, its last axis fastest. A block stays until its place changes.
        axes = [axis for axis in _arguments_of(transform) if axis < len(grid)]
        fastest = max(axes, default=-1)
        num_copies = float(math.prod(grid[: fastest + 1]))
        if axes and fastest not in _arguments_of(transform, through_memory=False):
            others = [size for axis, size in enumerate(grid[:fastest]) if axis not in axes]
            num_passes = float(math.prod(others))
    dims = [size for size in shaped.shape if size > 0]
    num_bytes = math.prod(dims) * _bits_of_name(str(shaped.element_type)) / 8
    return Block(num_bytes, num_copies, _VMEM in str(memory), num_passes=num_passes)


def _arguments_of(function: ir.Operation, *, through_memory: bool = True) -> set[int]:
    """Returns the numbers of the arguments on which the results of a function depend.

    Args:
        through_memory: Whether a number that is read from memory depends on its place there.
    """
    block = function.regions[0].blocks[0]
    *_, result = block.operations
    used, seen, waiting = set(), set(), list(result.operands)
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        if isinstance(value, ir.BlockArgument):
            used.add(value.arg_number)
        elif isinstance(value.owner, ir.Operation | ir.OpView):
            if through_memory or not value.owner.name.endswith("load"):
                waiting += list(value.owner.operands)
    return used


class _Counter:
    """Counts the operations of one step of the grid."""

    def __init__(self):
        self.products: list[Product] = []
        self.vector_ops = 0.0
        self.has_unknown_loops = False

    def count(self, block: ir.Block, runs: float) -> None:
        for operation in block.operations:
            name = operation.operation.name.removeprefix("stable_mosaic.")
            if name.endswith((".matmul", "vector.contract")):
                self.products.append(_product(operation.operation, runs))
            elif name.startswith(("arith.", "math.")) and len(operation.results):
                result = operation.results[0].type
                if isinstance(result, ir.VectorType) and name != "arith.constant":
                    self.vector_ops += runs * math.prod(ir.VectorType(result).shape)
            self._count_regions(operation.operation, name, runs)

    def _count_regions(self, operation: ir.Operation, name: str, runs: float) -> None:
        if name == "scf.if":
            branches = []
            for region in operation.regions:
                branch = _Counter()
                for block in region.blocks:
                    branch.count(block, runs)
                branches.append(branch)
            largest = max(branches, key=lambda branch: (branch.flops, branch.vector_ops))
            self.products += largest.products
            self.vector_ops += largest.vector_ops
            self.has_unknown_loops |= largest.has_unknown_loops
            return
        trips = 1
        if name in ("scf.for", "scf.while"):
            known = _trip_count(operation) if name == "scf.for" else None
            self.has_unknown_loops |= known is None
            trips = 1 if known is None else known
        for region in operation.regions:
            for block in region.blocks:
                self.count(block, runs * trips)

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)


def _product(operation: ir.Operation, runs: float) -> Product:
    left, right = (ir.VectorType(operand.type) for operand in list(operation.operands)[:2])
    num_left, num_right = math.prod(left.shape), math.prod(right.shape)
    num_out = math.prod(ir.VectorType(operation.results[0].type).shape)
    # Of [m, k] @ [k, n]; of a batch of products, `m` includes the batch.
    k = max(1, round(math.sqrt(num_left * num_right / num_out)))
    if "dimension_numbers" in operation.attributes:
        contracted = _CONTRACTED.search(str(operation.attributes["dimension_numbers"]))
        if contracted and contracted[1]:
            k = math.prod(left.shape[int(dim)] for dim in contracted[1].split(","))
    m = max(1, num_left // k)
    dtypes = (str(left.element_type), str(right.element_type))
    return Product(m, k, max(1, num_out // m), dtypes, runs)


def _trip_count(loop: ir.Operation) -> int | None:
    """Returns the iterations of a loop with constant bounds; None if they are not known."""
    bounds = [_constant(operand) for operand in list(loop.operands)[:3]]
    if None in bounds:
        return None
    start, stop, step = (bound or 0 for bound in bounds)
    return max(0, -(-(stop - start) // step)) if step else None


def _constant(value: ir.Value) -> int | None:
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    _, _, name = owner.name.rpartition("arith.")
    if name in _SUMS:
        left, right = map(_constant, owner.operands)
        return None if left is None or right is None else _SUMS[name](left, right)
    if name != "constant":
        return None
    attribute = owner.attributes["value"]
    return ir.IntegerAttr(attribute).value if isinstance(attribute, ir.IntegerAttr) else None


def _operations(module: ir.Operation) -> Iterable[ir.Operation]:
    return [operation.operation for operation in module.regions[0].blocks[0].operations]


def _integers(operation: ir.Operation, name: str) -> list[int]:
    if name not in operation.attributes:
        return []
    return [int(number) for number in ir.DenseI64ArrayAttr(operation.attributes[name])]


def _integer(operation: ir.Operation, name: str) -> int:
    found = name in operation.attributes
    return ir.IntegerAttr(operation.attributes[name]).value if found else 0


def _bits_of_name(name: str) -> int:
    match = re.search(r"(\d+)", name)  # f32, bf16, i8, f8E4M3FN
    return int(match[1]) if match else 32
