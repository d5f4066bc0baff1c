"""Finds the repeated layers of a lowered program, and makes programs with fewer of them.

The layers of a model that is written out, without `lax.scan`, are equal operations one after
another: forward, backward and in the optimizer. Three steps find and remove them, in the block of
the program that has most of them:

1. The longest periodic run of products, calls and loops, with equal operations between them, gives
   the period. Each of them corresponds to the one a period later, in the next layer.
2. If two operations correspond, their operands and their results correspond. If two values
   correspond, equal operations that compute or use them correspond. This reaches all operations of
   the layers.
3. The last layers are removed. Their users get the corresponding value of a remaining layer. If two
   layers have one, they get the value that is computed first.

The inputs and results of the program stay, so that their memory counts. The result of a removed
layer becomes the input that it updates, or the result of another layer.
"""

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir

from tpudist.xla.compiler import lowered_program

MIN_LAYERS = 8
"""Fewer repetitions may be parts of a layer, such as its products."""

# Each layer has some of these operations.
_MARKERS = {
    "stablehlo.dot_general",
    "stablehlo.convolution",
    "stablehlo.custom_call",
    "stablehlo.while",
    "func.call",
}
# Attributes in which layers may differ: a constant, and the keys or rows of a value that they use.
_OF_ONE_LAYER = {"value", "start_indices", "limit_indices"}
_SUM = "stablehlo.add"
_ARGUMENT = -1  # statement of the arguments of the block
_Value = tuple[int, int]  # statement and number of its result


@dataclass
class _Statement:
    """An operation of the block.

    Attributes:
        number: The place of the operation in the block.
        name: The name of the operation, such as "stablehlo.add".
        label: Number that equal operations share.
        operands: Used values, also those in regions; None for values of the regions themselves.
        num_results: Number of results.
        layer: Number of its layer; None outside of layers. Operations before and after the layers
            that are equal to theirs have negative or too large numbers.
    """

    number: int
    name: str
    label: int
    operands: list[_Value | None]
    num_results: int
    layer: int | None = None

    def values(self) -> list[_Value | None]:
        """Returns operands and results."""
        return [*self.operands, *((self.number, i) for i in range(self.num_results))]


class RepeatedLayers:
    """The repeated layers of a lowered program, which stays as it is.

    Attributes:
        num_layers: Number of repetitions; 0 for fewer than `MIN_LAYERS`.
    """

    def __init__(self, lowered: jax.stages.Lowered):
        self._lowered = lowered
        self._statements, self._types = _read(lowered_program.copy_module(lowered))
        self._users: dict[_Value, list[tuple[_Statement, int]]] = collections.defaultdict(list)
        for statement in self._statements:
            for i, value in enumerate(statement.operands):
                if value is not None:
                    self._users[value].append((statement, i))
        self._next: dict[_Value, _Value] = {}  # the value of the next layer
        self._previous: dict[_Value, _Value] = {}
        self.num_layers = self._find_layers()

    def keep(self, num_layers: int) -> jax.stages.Lowered | None:
        """Returns the program with its first `num_layers` layers; None if it cannot be made."""
        removed = {
            x.number
            for x in self._statements
            if x.layer is not None and num_layers <= x.layer < self.num_layers
        }
        kept = [x for x in self._statements if x.number not in removed]
        replacements: dict[tuple[int, int], _Value] = {}  # by statement and number of the operand
        operands: dict[int, Sequence[_Value | None]] = {}
        for statement in kept:
            operands[statement.number] = own = list(statement.operands)
            for i, value in enumerate(own):
                if value is not None and value[0] in removed:
                    other = self._argument_of(value) if statement is self._statements[-1] else None
                    own[i] = other = other or self._replacement(value, statement.number, removed)
                    if other is None:
                        return None
                    replacements[statement.number, i] = other
        # A part of each layer that has no correspondence must stay, or its time is lost.
        used = _find_used({x.number: x.operands for x in self._statements})
        lost = used - removed - _find_used(operands)
        num_lost = sum(self._statements[number].name in _MARKERS for number in lost)
        if num_lost >= self.num_layers - num_layers:
            return None
        module = lowered_program.copy_module(self._lowered)
        _change(module, replacements, removed)
        return lowered_program.with_module(self._lowered, module)

    def _find_layers(self) -> int:
        markers = [x for x in self._statements if x.name in _MARKERS]
        # Operations between two products tell products of equal shapes apart.
        parts = itertools.pairwise([-1, *(x.number for x in markers)])
        texts = [tuple(x.label for x in self._statements[a + 1 : b + 1]) for a, b in parts]
        kinds = {text: kind for kind, text in enumerate(texts)}
        start, period, length = _longest_run(np.array([kinds[text] for text in texts]))
        num_layers = length // period
        if num_layers < MIN_LAYERS:
            return 0
        pairs = collections.deque(
            (markers[i], markers[i + period], (i - start) // period)
            for i in range(start, start + (num_layers - 1) * period)
        )
        following: dict[int, _Statement] = {}  # the corresponding statement of the next layer
        while pairs:
            first, second, layer = pairs.popleft()
            if first is second or first.label != second.label:
                continue
            if first.layer is None:
                first.layer = layer if second.layer is None else second.layer - 1
            if second.layer is None:
                second.layer = first.layer + 1
            if second.layer != first.layer + 1:
                continue
            following[first.number] = second
            for a, b in zip(first.values(), second.values(), strict=True):
                if a is None or b is None or a == b or a in self._next or b in self._previous:
                    continue
                self._next[a], self._previous[b] = b, a
                pairs += [(x, y, first.layer) for x, y in self._neighbors(a, b)]
        return self._number_layers(list(_chains(self._statements, following)))

    def _number_layers(self, chains: list[list[_Statement]]) -> int:
        """Gives each statement of a layer the number of its layer; returns the number of layers.

        Numbers so far may be one too small or too large: of a statement that was reached from
        another layer.
        """
        ((num_layers, _),) = collections.Counter(map(len, chains)).most_common(1)
        numbered: dict[int, int] = {}

        def number(chain: list[_Statement], start: int) -> None:
            for layer, statement in enumerate(chain, start):
                numbered[statement.number] = statement.layer = layer

        # Operations before or after the layers may be equal to theirs. Then the layers are those
        # that most connected statements have.
        others = []
        for chain in chains:
            if len(chain) == num_layers:
                number(chain, 0)
            else:
                others.append(chain)
        is_clear = True
        while others:
            waiting = []
            for chain in others:
                gap = num_layers - len(chain)
                votes = collections.Counter(
                    numbered[y] - place
                    for place, x in enumerate(chain)
                    for y in self._neighbor_numbers(x)
                    if y in numbered and min(0, gap) <= numbered[y] - place <= max(0, gap)
                )
                (start, most), (_, second) = (*votes.most_common(2), (0, 0), (0, 0))[:2]
                if most > second or not is_clear:
                    number(chain, start)
                    is_clear = True
                else:
                    waiting.append(chain)
            is_clear = len(waiting) < len(others)
            others = waiting
        return num_layers

    def _neighbor_numbers(self, statement: _Statement) -> Iterator[int]:
        """Yields the numbers of the statements that compute what one uses, and use its results."""
        yield from (x[0] for x in statement.operands if x is not None)
        for i in range(statement.num_results):
            yield from (user.number for user, _ in self._users[statement.number, i])

    def _neighbors(self, a: _Value, b: _Value) -> Iterator[tuple[_Statement, _Statement]]:
        """Yields the statements that compute and use corresponding values."""
        if _ARGUMENT not in (a[0], b[0]) and a[1] == b[1]:
            yield self._statements[a[0]], self._statements[b[0]]
        users, others = self._users[a], self._users[b]
        if len(users) == len(others):
            for (x, i), (y, j) in zip(users, others, strict=True):
                if i == j:
                    yield x, y

    def _argument_of(self, value: _Value) -> _Value | None:
        """Returns the argument that a result updates, such as a weight; None if it is unknown.

        A result that is a donated argument takes no time.
        """
        seen, reached = {value}, collections.deque([value])
        while reached:
            found = reached.popleft()
            if found[0] == _ARGUMENT:
                return found
            for other in self._statements[found[0]].operands:
                if other and other not in seen and self._types[other] == self._types[value]:
                    seen.add(other)
                    reached.append(other)
        return None

    def _replacement(self, value: _Value, before: int, removed: set[int]) -> _Value | None:
        """Returns the corresponding value of a layer that stays; None if there is none."""
        found: _Value | None = value
        while found is not None and found[0] in removed:
            statement = self._statements[found[0]]
            # In the direction in which values are computed earlier: backward, in the next layer.
            is_forward = self._previous.get(found, found) < found
            directions = [self._previous, self._next]
            # A sum of scalars over the layers may be in the order of their names. Leave out this
            # layer.
            is_sum = statement.name == _SUM and not self._types[found].shape
            for neighbors in directions if is_forward else reversed(directions):
                other = None if is_sum else self._follow(found, neighbors, removed)
                if other is not None and other[0] < before:
                    return other
            same = [x for x in statement.operands if x and self._types[x] == self._types[value]]
            sums = [x for x in same if self._statements[x[0]].name == _SUM]
            found = next(iter(sums or same), None)
        return found

    def _follow(
        self, value: _Value, neighbors: Mapping[_Value, _Value], removed: set[int]
    ) -> _Value | None:
        for _ in range(self.num_layers):
            if value[0] not in removed or value not in neighbors:
                break
            value = neighbors[value]
        return None if value[0] in removed else value


def _chains(
    statements: Sequence[_Statement], following: Mapping[int, _Statement]
) -> Iterator[list[_Statement]]:
    """Yields the corresponding statements of all layers."""
    later = {x.number for x in following.values()}
    for statement in statements:
        if statement.number in following and statement.number not in later:
            chain = [statement]
            while chain[-1].number in following:
                chain.append(following[chain[-1].number])
            yield chain


def _find_used(operands: Mapping[int, Sequence[_Value | None]]) -> set[int]:
    """Returns the numbers of the statements that the last one needs."""
    used = {max(operands)}
    for number in sorted(operands, reverse=True):
        if number in used:
            used |= {x[0] for x in operands[number] if x is not None and x[0] != _ARGUMENT}
    return used


def _longest_run(labels: np.ndarray) -> tuple[int, int, int]:
    """Returns start, period and length of the longest periodic run of equal labels."""
    best = 0, 1, 0
    for period in range(1, len(labels) // MIN_LAYERS + 1):
        equal = np.concatenate([[False], labels[period:] == labels[:-period], [False]])
        starts, ends = np.flatnonzero(np.diff(equal.astype(int))).reshape(-1, 2).T
        if len(starts):
            longest = np.argmax(ends - starts)
            length = int(ends[longest] - starts[longest]) + period
            if length > best[2]:
                best = int(starts[longest]), period, length
    return best


def _read(module: ir.Module) -> tuple[list[_Statement], dict[_Value, Any]]:
    """Returns the operations of the block with the most of them, and the types of its values."""
    block = _main_block(module)
    printer = _Printer(module)
    labels: dict[str, int] = {}
    values: dict[Any, _Value] = {x: (_ARGUMENT, i) for i, x in enumerate(block.arguments)}
    statements = []
    for number, opview in enumerate(block.operations):
        operation = opview.operation
        label = labels.setdefault(printer.print(operation), len(labels))
        operands = [values.get(user.operands[i]) for user, i in _uses(operation)]
        results = operation.results
        statements.append(_Statement(number, operation.name, label, operands, len(results)))
        values |= {x: (number, i) for i, x in enumerate(results)}
    return statements, {number: x.type for x, number in values.items()}


def _change(
    module: ir.Module, replacements: Mapping[tuple[int, int], _Value], removed: set[int]
) -> None:
    block = _main_block(module)
    operations = [opview.operation for opview in block.operations]
    arguments = list(block.arguments)
    uses: dict[int, list[tuple[Any, int]]] = {}
    for (number, use), (source, result) in replacements.items():
        if number not in uses:
            uses[number] = list(_uses(operations[number]))
        user, i = uses[number][use]
        is_argument = source == _ARGUMENT
        user.operands[i] = arguments[result] if is_argument else operations[source].results[result]
    for number in sorted(removed, reverse=True):
        operations[number].erase()


def _main_block(module: ir.Module) -> Any:
    """Returns the block with most of the products, calls and loops."""

    def num_markers(block: Any) -> int:
        return sum(op.operation.name in _MARKERS for op in block.operations)

    return max(_blocks(module.operation), key=num_markers)


def _blocks(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            yield block
            for inner in block.operations:
                yield from _blocks(inner.operation)


def _uses(operation: Any) -> Iterator[tuple[Any, int]]:
    """Yields each operand, also of operations in the regions, as operation and number."""
    for i in range(len(operation.operands)):
        yield operation, i
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _uses(inner.operation)


class _Printer:
    """Prints operations, so that equal operations of different layers have equal texts."""

    def __init__(self, module: ir.Module):
        self._functions = {
            ir.StringAttr(op.attributes["sym_name"]).value: op.operation
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        self._bodies: dict[str, str] = {}
        self._types: dict[Any, str] = {}

    def print(self, operation: Any) -> str:
        """Returns a text of an operation and its regions, without the names of values."""
        parts = [operation.name]
        for x in (*operation.operands, *operation.results):
            if x.type not in self._types:
                self._types[x.type] = str(x.type)
            parts.append(self._types[x.type])
        attributes = operation.attributes
        for i in range(len(attributes)):
            name, attribute = attributes[i].name, attributes[i].attr
            if name == "callee":
                parts.append(self._print_function(attribute.value))
            elif name not in _OF_ONE_LAYER:
                parts += name, str(attribute)
        return " ".join([*parts, *self._print_regions(operation)])

    def _print_regions(self, operation: Any) -> Iterator[str]:
        for region in operation.regions:
            for block in region.blocks:
                yield "{"
                yield from (self.print(inner.operation) for inner in block.operations)
                yield "}"

    def _print_function(self, name: str) -> str:
        # Equal functions may have different names.
        if name not in self._bodies:
            self._bodies[name] = " ".join(self._print_regions(self._functions[name]))
        return self._bodies[name]
