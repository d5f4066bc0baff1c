"""Counts the copies that a custom kernel (Pallas) starts itself, for example in `emit_pipeline`.

Whether a step copies a block depends on integers: the place in the grid, the iteration of a loop,
and whether the place of the block has changed. So the integers of the kernel are computed, for all
steps and iterations; numbers in vectors are not.
"""

import collections
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence

from jax.extend.mlir import ir

_MAX_EVALUATIONS = 1_000_000  # about a second


def _divide(a: int, b: int) -> int:
    """Returns the quotient, rounded toward zero."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _compare_unsigned(compare: Callable[[int, int], bool]) -> Callable[[int, int], bool]:
    # A negative integer is larger than all others, as its bits are.
    return lambda a, b: compare(a % 2**64, b % 2**64)


_SIGNED = (operator.lt, operator.le, operator.gt, operator.ge)
_COMPARISONS = (operator.eq, operator.ne, *_SIGNED, *map(_compare_unsigned, _SIGNED))
_Integer = int | None  # None if the value is unknown
_OPERATIONS: dict[str, Callable[..., int]] = {
    "addi": operator.add,
    "subi": operator.sub,
    "muli": operator.mul,
    "divsi": _divide,
    "divui": operator.floordiv,
    "floordivsi": operator.floordiv,
    "remsi": lambda a, b: a - b * _divide(a, b),
    "remui": operator.mod,
    "minsi": min,
    "maxsi": max,
    "xori": operator.xor,
} | dict.fromkeys(("extui", "extsi", "trunci", "index_cast", "index_castui"), lambda a: a)
_LOGIC = {"andi": (0, operator.and_), "ori": (1, operator.or_)}  # the operand that decides
_ENQUEUE, _WAITS = "enqueue_dma", ("wait_dma", "wait_dma2")  # the last of jax 0.10
_IN_HBM = ("memory_space<any>", "memory_space<hbm>")


class _UnknownCopies(Exception):
    """The copies depend on the values of arrays, or computing their number takes too long."""


@dataclasses.dataclass
class Copies:
    """The copies that a kernel starts itself between HBM and other memory.

    Attributes:
        num_bytes: Bytes by the number of the kernel's argument.
        num_waits: Times that the kernel waits for copies that it has started since the last wait.
    """

    num_bytes: dict[int, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    num_waits: int = 0


def starts_copies(operation: ir.Operation) -> bool:
    """Returns whether an operation, or one inside it, starts a copy."""
    return _name(operation) == _ENQUEUE or any(starts_copies(x) for x in _inside(operation))


def count(main: ir.Operation, grid: Sequence[int], bits_of: Callable[[str], int]) -> Copies | None:
    """Returns the copies of a run of a kernel; None if they depend on the values of arrays.

    Args:
        main: Function of the kernel.
        grid: Sizes of its grid, whose places are the first arguments.
        bits_of: Returns the bits of an element of a type.
    """
    if not starts_copies(main):
        return Copies()
    block = main.regions[0].blocks[0]
    runner = _Runner(bits_of)
    try:
        for step in range(math.prod(grid)):
            places = []
            for size in reversed(grid):
                step, place = divmod(step, size)
                places.insert(0, place)
            values = dict(zip(block.arguments, places, strict=False))
            runner.run(block, values)
    except _UnknownCopies:
        return None
    return runner.copies


class _Runner:
    def __init__(self, bits_of: Callable[[str], int]):
        self.copies = Copies()
        self._bits_of = bits_of
        self._plans: dict[ir.Block, list] = {}
        self._evaluations = 0
        self._has_started = False

    def run(self, block: ir.Block, values: dict[ir.Value, _Integer]) -> list[_Integer]:
        """Computes the integers of a block, and returns the yielded ones."""
        plan = self._plans.get(block)
        if plan is None:
            plan = self._plans[block] = list(self._plan(block))
        self._evaluations += len(plan)
        if self._evaluations > _MAX_EVALUATIONS:
            raise _UnknownCopies
        yielded: list[_Integer] = []
        for act, operands, results, extra in plan:
            read = [values.get(x) for x in operands]
            if act is _yield:
                yielded = read
            else:
                found = act(self, read, values, extra)
                values.update(zip(results, found, strict=False))
        return yielded

    def _plan(self, block: ir.Block) -> Iterator[tuple]:
        """Yields the operations that matter: those of integers, loops, branches and copies."""
        for operation in _operations(block):
            name, operands = _name(operation), list(operation.operands)
            results = list(operation.results)
            if name == "constant":
                value = operation.attributes["value"]
                if isinstance(value, ir.IntegerAttr | ir.BoolAttr):
                    number = abs(value.value) if str(value.type) == "i1" else int(value.value)
                    yield _constant, (), results, number
            elif name == "cmpi":
                predicate = ir.IntegerAttr(operation.attributes["predicate"]).value
                yield _compute, operands, results, _COMPARISONS[predicate]
            elif name in _OPERATIONS and _is_integer(results[0]):
                yield _compute, operands, results, _OPERATIONS[name]
            elif name in _LOGIC and _is_integer(results[0]):
                yield _decide, operands, results, _LOGIC[name]
            elif name == "select" and _is_integer(results[0]):
                yield _select, operands, results, None
            elif name == "yield":
                yield _yield, operands, (), None
            elif name == _ENQUEUE:
                yield _start, (), (), self._ends(operation)
            elif name in _WAITS:
                yield _wait, (), (), None
            elif starts_copies(operation) or (
                _inside(operation) and any(map(_is_integer, results))
            ):
                blocks = [x.blocks[0] if len(x.blocks) else None for x in operation.regions]
                yield _REGIONS.get(name, _fail), operands, results, blocks

    def _ends(self, operation: ir.Operation) -> list[tuple[int, float]]:
        """Returns the argument of the kernel at each end in HBM, and the bytes that are copied."""
        # Operands: the source, perhaps its semaphore, the target, and so on.
        sizes = list(ir.DenseI32ArrayAttr(operation.attributes["operandSegmentSizes"]))
        operands, ends = list(operation.operands), []
        for memory in (operands[0], operands[sizes[0] + sizes[1]]):
            shaped = ir.MemRefType(memory.type)
            base = memory
            # Slices and other names have the memory as their first operand.
            while isinstance(owner := base.owner, ir.Operation | ir.OpView) and len(owner.operands):
                base = owner.operands[0]
            if isinstance(base, ir.BlockArgument) and any(x in str(base.type) for x in _IN_HBM):
                if any(size < 0 for size in shaped.shape):
                    raise _UnknownCopies
                bits = math.prod(shaped.shape) * self._bits_of(str(shaped.element_type))
                ends.append((base.arg_number, bits / 8))
        return ends

    def start(self, ends: list[tuple[int, float]]) -> None:
        for number, num_bytes in ends:
            self.copies.num_bytes[number] += num_bytes
        self._has_started |= bool(ends)

    def wait(self) -> None:
        self.copies.num_waits += self._has_started
        self._has_started = False


# The actions of a plan. Each receives the runner, the operands, all integers, and its constant.


def _constant(_runner, _read, _values, number):
    return [number]


def _compute(_runner, read, _values, compute):
    if None in read or (read[-1] == 0 and compute in _DIVISIONS):
        return [None]
    return [int(compute(*read))]


_DIVISIONS = [_OPERATIONS[name] for name in ("divsi", "divui", "floordivsi", "remsi", "remui")]


def _decide(_runner, read, _values, logic):
    deciding, compute = logic
    if None not in read:
        return [compute(*read)]
    return [deciding if deciding in read else None]


def _select(_runner, read, _values, _extra):
    condition, first, second = read
    if condition is None:
        return [first if first == second else None]
    return [first if condition else second]


def _yield(*_arguments):
    raise AssertionError("run returns the yielded values itself")


def _start(runner, _read, _values, ends):
    runner.start(ends)
    return []


def _wait(runner, *_arguments):
    runner.wait()
    return []


def _branch(runner, read, values, blocks):
    if read[0] is None:
        raise _UnknownCopies
    block = blocks[0] if read[0] else blocks[1]
    return [] if block is None else runner.run(block, values)


def _loop(runner, read, values, blocks):
    first, stop, step, *carried = read
    if None in (first, stop, step) or not step:
        raise _UnknownCopies
    (block,) = blocks
    for place in range(first, stop, step):
        values.update(zip(block.arguments, (place, *carried), strict=True))
        carried = runner.run(block, values)
    return carried


def _region(runner, _read, values, blocks):
    return runner.run(blocks[0], values)


def _fail(*_arguments):
    raise _UnknownCopies


_REGIONS = {"if": _branch, "for": _loop, "region": _region}


def _name(operation: ir.Operation) -> str:
    return operation.name.rpartition(".")[2]


def _operations(block: ir.Block) -> list[ir.Operation]:
    return [operation.operation for operation in block.operations]


def _inside(operation: ir.Operation) -> list[ir.Operation]:
    return [
        x for region in operation.regions for block in region.blocks for x in _operations(block)
    ]


def _is_integer(value: ir.Value) -> bool:
    return isinstance(value.type, ir.IntegerType | ir.IndexType)
