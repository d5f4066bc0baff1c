"""Datasets: `tf.data` pipelines over arrays become `tpudist.NumpyDataset`s where that is safe.

This is safe if a pipeline slices arrays, optionally shuffles, batches and repeats them in this
order, and if only a strategy reads it. Other pipelines stay: a strategy and Keras accept them.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer
from tpudist.port.pipeline_steps import (
    ONE,
    PARAMETERS,
    SLICES,
    Chain,
    Stage,
    Step,
    advance,
    arguments_of,
    begin,
    keyword_of,
    read_step,
    repeat_rows,
)

_DISTRIBUTES = {"experimental_distribute_dataset"}
_CALLS = {"distribute_datasets_from_function", "experimental_distribute_datasets_from_function"}


class DatasetPipelines(Transformer):
    """Rewrites the pipelines that are known whole, call by call."""

    def __init__(self, program: Program):
        """Finds them."""
        super().__init__(program)
        self._steps: dict[cst.CSTNode, Step] = {}
        self._bases: dict[cst.CSTNode, cst.CSTNode | None] = {}
        finder = _Finder(program)
        program.walk(finder)
        for chain in finder.chains():
            self._steps |= {step.call: step for step in chain.steps}
            self._bases[chain.base] = chain.repeat

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Rewrites one call of a pipeline."""
        if original_node in self._bases:
            if self._bases[original_node] is None:
                return updated_node.with_changes(func=self.write("tpudist.NumpyDataset"))
            return updated_node
        if original_node in self._bases.values():
            return self._repeat_element(updated_node)
        step = self._steps.get(original_node)
        if step is None:
            return updated_node
        assert isinstance(updated_node.func, cst.Attribute)
        if step.method in ("cache", "prefetch"):
            return updated_node.func.value
        args = [cst.Arg(value, **keyword_of(name)) for name, value in arguments_of(step)]
        return updated_node.with_changes(args=args)

    def _repeat_element(self, repeat: cst.Call) -> cst.BaseExpression:
        """`from_tensors(element).repeat(n)` as a dataset of arrays of n rows."""
        assert isinstance(repeat.func, cst.Attribute)
        base = repeat.func.value
        assert isinstance(base, cst.Call)
        element, times = base.args[0].value, repeat.args[0].value
        if isinstance(element, cst.Tuple):
            parts = [
                part.with_changes(value=repeat_rows(part.value, times)) for part in element.elements
            ]
            arrays: cst.BaseExpression = element.with_changes(elements=parts)
        else:
            arrays = repeat_rows(element, times)
        return cst.Call(self.write("tpudist.NumpyDataset"), [cst.Arg(arrays)])


class _Finder(cst.CSTVisitor):
    """Finds the pipelines that can be rewritten; others stay."""

    def __init__(self, program: Program):
        super().__init__()
        self._program = program
        self._ends: list[cst.Call] = []

    def visit_Call(self, node: cst.Call) -> None:
        """Notes what begins a pipeline."""
        if self._program.callee(node) in (SLICES, ONE):
            end = _end(self._program, node)
            assert isinstance(end, cst.Call)
            self._ends.append(end)

    def chains(self) -> list[Chain]:
        """The pipelines, each whole and read by strategies only."""
        chains: list[Chain] = []
        seen: set[tuple[object, str]] = set()
        for end in self._ends:
            name = _name_of(self._program, end)
            if name is None:
                if _is_read_by_strategy(self._program, end):
                    chains += self._chains_of([end], [])
                continue
            key = (self._program.scope(name), name.value)
            if key not in seen:
                seen.add(key)
                chains += self._chains_of_name(name)
        return chains

    def _chains_of_name(self, name: cst.Name) -> list[Chain]:
        """All that a name is bound to, if all of it can be rewritten.

        The chain may span several statements, `dataset = dataset.batch(64)`, and end with the
        dataset distributed under its old name. Then they stand in one block, after each other.
        """
        program = self._program
        pieces: list[cst.Call] = []
        last: cst.Call | None = None
        for value in program.values(name) or [name]:
            if not isinstance(value, cst.Call):
                return []
            if _distributes(value, name.value):
                if last is not None:
                    return []
                last = value
            else:
                pieces.append(value)
        within = {id(_root(piece)) for piece in pieces}
        end = program.line(last) if last else None
        reads = [
            x
            for x in program.references(name)
            if id(x) not in within and (end is None or program.line(x) <= end)
        ]
        tails = [tail for x in reads if (tail := _end(program, x)) is not x]
        reads = [_end(program, x) for x in reads]
        if not reads or not all(_is_read_by_strategy(program, x) for x in reads):
            return []
        ends = [x for x in tails if isinstance(x, cst.Call)]
        goes_on = ends or last or not all(isinstance(_root(x), cst.Call) for x in pieces)
        in_order = [*pieces, *ends, *([last] if last else [])]
        if goes_on and len({id(_block(program, x)) for x in in_order}) != 1:
            return []
        if last is not None and any(program.line(x) > program.line(last) for x in in_order):
            return []
        return self._chains_of(pieces, ends)

    def _chains_of(self, pieces: list[cst.Call], ends: list[cst.Call]) -> list[Chain]:
        """The chains of one name, in the order of the program; none if one cannot be rewritten.

        `ends` continue the dataset where it is read, without binding it.
        """
        chains: list[Chain] = []
        stage: Stage | None = None
        for piece in sorted([*pieces, *ends], key=self._program.line):
            root, calls = _unchain(piece)
            if isinstance(root, cst.Call):
                chain = begin(self._program, root, calls)
                if chain is None:
                    return []
                stage, calls = Stage.EXAMPLES, calls[1:] if chain.repeat is not None else calls
                chains.append(chain)
            if not chains:
                return []
            after = stage
            for call in calls:
                step = read_step(call)
                after = advance(after, step) if after and step else None
                if after is None or step is None:
                    return []
                chains[-1].steps.append(step)
            if piece in ends and (after is None or after < Stage.BATCHED):
                return []
            stage = stage if piece in ends else after
        is_whole = bool(ends) or (stage is not None and stage >= Stage.BATCHED)
        return chains if is_whole else []


def _unchain(end: cst.BaseExpression) -> tuple[cst.BaseExpression, list[cst.Call]]:
    """Returns the first call of a chain, and its calls in order."""
    calls: list[cst.Call] = []
    while (
        isinstance(end, cst.Call)
        and isinstance(end.func, cst.Attribute)
        and isinstance(end.func.value, cst.Call | cst.Name)
        and not (isinstance(end.func.value, cst.Name) and end.func.attr.value not in PARAMETERS)
    ):
        calls.append(end)
        end = end.func.value
    return end, calls[::-1]


def _root(end: cst.BaseExpression) -> cst.BaseExpression:
    return _unchain(end)[0]


def _distributes(call: cst.Call, name: str) -> bool:
    """Whether a call distributes the dataset of a name."""
    return (
        isinstance(call.func, cst.Attribute)
        and call.func.attr.value in _DISTRIBUTES
        and bool(call.args)
        and isinstance(call.args[0].value, cst.Name)
        and call.args[0].value.value == name
    )


def _block(program: Program, node: cst.CSTNode) -> cst.CSTNode | None:
    """The block that a node's statement is in."""
    for outer in program.around(node):
        if isinstance(outer, cst.SimpleStatementSuite):  # in the line of an `if`
            return outer
        if isinstance(outer, cst.BaseStatement):
            return program.parent(outer)
    return None


def _end(program: Program, call: cst.CSTNode) -> cst.CSTNode:
    """The last call of the chain that a node begins."""
    while True:
        attribute = program.parent(call)
        outer = program.parent(attribute) if isinstance(attribute, cst.Attribute) else None
        if not isinstance(outer, cst.Call) or outer.func is not attribute:
            return call
        call = outer


def _name_of(program: Program, end: cst.Call) -> cst.Name | None:
    """The name that a chain is assigned to."""
    statement = program.parent(end)
    if isinstance(statement, cst.Assign) and len(statement.targets) == 1:
        target = statement.targets[0].target
        return target if isinstance(target, cst.Name) else None
    return None


def _is_read_by_strategy(program: Program, node: cst.CSTNode) -> bool:
    """Whether a dataset is given to a strategy where it is read, or returned to one."""
    outer = program.parent(node)
    if isinstance(outer, cst.Arg):
        call = program.parent(outer)
        return (
            isinstance(call, cst.Call)
            and isinstance(call.func, cst.Attribute)
            and call.func.attr.value in _DISTRIBUTES
            and call.args[0] is outer
        )
    if not isinstance(outer, cst.Return | cst.Lambda):
        return False
    function = next(x for x in program.around(node) if isinstance(x, cst.FunctionDef | cst.Lambda))
    if isinstance(function, cst.Lambda):
        return _is_called_by_strategy(program, function)
    references = program.references(function.name)
    return bool(references) and all(_is_called_by_strategy(program, one) for one in references)


def _is_called_by_strategy(program: Program, function: cst.CSTNode) -> bool:
    outer = program.parent(function)
    call = program.parent(outer) if isinstance(outer, cst.Arg) else None
    return (
        isinstance(call, cst.Call)
        and isinstance(call.func, cst.Attribute)
        and call.func.attr.value in _CALLS
    )
