"""Turns `tf.data` pipelines over arrays into `tpudist.NumpyDataset`s if that is safe.

This is safe if a pipeline slices arrays, optionally shuffles, batches and repeats them in this
order, and if only a strategy reads it. Other pipelines stay: a strategy and Keras accept them.
"""

from __future__ import annotations

import libcst as cst

from tpudist.port.analysis.nodes import keyword_arg, method_name
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer
from tpudist.port.pipeline_steps import (
    ONE_ELEMENT,
    PARAMETERS,
    SLICES,
    Chain,
    Stage,
    Step,
    advance,
    arguments_of,
    begin_chain,
    read_step,
    repeat_rows,
)

_DISTRIBUTES = {"experimental_distribute_dataset"}
_CALLS = {"distribute_datasets_from_function", "experimental_distribute_datasets_from_function"}


class DatasetPipelines(Transformer):
    """Rewrites the pipelines that are known completely, call by call."""

    def __init__(self, program: Program):
        super().__init__(program)
        self._steps: dict[cst.CSTNode, Step] = {}
        self._bases: dict[cst.CSTNode, cst.CSTNode | None] = {}
        for chain in _ChainFinder(program).chains():
            self._steps |= {step.call: step for step in chain.steps}
            self._bases[chain.base] = chain.repeat

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Rewrites one call of a pipeline."""
        # Three kinds of calls in a chain: its first call, the `repeat` that makes rows of a single
        # element (which is written together with the first call), and the steps.
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
        # An array in memory needs no cache, and a distributed dataset prefetches by itself.
        if step.method in ("cache", "prefetch"):
            return updated_node.func.value
        arguments = arguments_of(step)
        args = [keyword_arg(name, x) if name else cst.Arg(x) for name, x in arguments]
        return updated_node.with_changes(args=args)

    def _repeat_element(self, repeat: cst.Call) -> cst.BaseExpression:
        """Rewrites `from_tensors(element).repeat(n)` to a dataset of arrays with n rows."""
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


class _ChainFinder:
    """Finds the pipelines that can be rewritten; others stay."""

    def __init__(self, program: Program):
        self._program = program

    def chains(self) -> list[Chain]:
        """Returns the complete pipelines that only strategies read."""
        chains: list[Chain] = []
        # A name with several chains is decided once, because either all of its chains change or
        # none.
        seen: set[tuple[object, str]] = set()
        for node in self._program.nodes(cst.Call):
            if self._program.callee(node) not in (SLICES, ONE_ELEMENT):
                continue
            end = _end(self._program, node)
            assert isinstance(end, cst.Call)
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
        """Returns the chains of a name; none if one of its values cannot be rewritten.

        The chain may span several statements, `dataset = dataset.batch(64)`, and end with the
        dataset distributed under its old name. Then all statements must be in one block.
        """
        program = self._program
        pieces: list[cst.Call] = []  # `name = chain`
        distribution: cst.Call | None = None  # `name = experimental_distribute_dataset(name)`
        # A name without known values stands for itself. It is not a call, so there are no chains.
        for value in program.values(name) or [name]:
            if not isinstance(value, cst.Call):
                return []
            if _distributes(value, name.value):
                if distribution is not None:
                    return []
                distribution = value
            else:
                pieces.append(value)
        # In `dataset = dataset.batch(8)` the read of `dataset` continues the chain, and is no
        # reader. A read after the distribution sees the distributed dataset under the old name.
        roots_of_pieces = {id(_root(piece)) for piece in pieces}
        last_line = program.line(distribution) if distribution else None
        reads = [
            x
            for x in program.references(name)
            if id(x) not in roots_of_pieces and (last_line is None or program.line(x) <= last_line)
        ]
        ends = [_end(program, x) for x in reads]
        if not ends or not all(_is_read_by_strategy(program, x) for x in ends):
            return []
        tails = [x for x in ends if isinstance(x, cst.Call)]  # `name.batch(8)` where it is read
        spans_statements = (
            tails or distribution or not all(isinstance(_root(x), cst.Call) for x in pieces)
        )
        calls = [*pieces, *tails, *([distribution] if distribution else [])]
        # A statement in an `if` or a loop may run not at all or repeatedly. Only in one block is
        # the order of the lines the order of the steps.
        if spans_statements and len({id(_block(program, x)) for x in calls}) != 1:
            return []
        if last_line is not None and any(program.line(x) > last_line for x in calls):
            return []
        return self._chains_of(pieces, tails)

    def _chains_of(self, pieces: list[cst.Call], tails: list[cst.Call]) -> list[Chain]:
        """Returns the chains of one name, in order; none if one cannot be rewritten.

        Args:
            pieces: Calls whose results are bound to the name.
            tails: Calls that continue the dataset where it is read, without binding it.
        """
        chains: list[Chain] = []
        stage: Stage | None = None
        for piece in sorted([*pieces, *tails], key=self._program.line):
            root, calls = _unchain(piece)
            if isinstance(root, cst.Call):
                chain = begin_chain(self._program, root, calls)
                if chain is None:
                    return []
                stage, calls = Stage.EXAMPLES, calls[1:] if chain.repeat is not None else calls
                chains.append(chain)
            if not chains:
                return []
            after = stage
            for call in calls:
                step = read_step(call)
                if step is None or after is None or (after := advance(after, step)) is None:
                    return []
                chains[-1].steps.append(step)
            # A strategy accepts batches, so a chain that it reads must have come to `batch`.
            if piece in tails and (after is None or after < Stage.BATCHED):
                return []
            # A chain that ends where it is read does not change the dataset of the name.
            stage = stage if piece in tails else after
        is_batched = bool(tails) or (stage is not None and stage >= Stage.BATCHED)
        return chains if is_batched else []


def _unchain(end: cst.BaseExpression) -> tuple[cst.BaseExpression, list[cst.Call]]:
    """Returns the first call of a chain, and its calls in order."""
    calls: list[cst.Call] = []
    while (
        isinstance(end, cst.Call)
        and isinstance(end.func, cst.Attribute)
        and isinstance(end.func.value, cst.Call | cst.Name)
        # A method of a name that is not a step, as in `np.array(...)`, begins a chain.
        and not (isinstance(end.func.value, cst.Name) and end.func.attr.value not in PARAMETERS)
    ):
        calls.append(end)
        end = end.func.value
    return end, calls[::-1]


def _root(end: cst.BaseExpression) -> cst.BaseExpression:
    return _unchain(end)[0]


def _distributes(call: cst.Call, name: str) -> bool:
    """Returns whether a call distributes the dataset of a name."""
    first = call.args[0].value if call.args else None
    is_name = isinstance(first, cst.Name) and first.value == name
    return is_name and method_name(call) in _DISTRIBUTES


def _block(program: Program, node: cst.CSTNode) -> cst.CSTNode | None:
    """Returns the block of a node's statement."""
    for outer in program.around(node):
        if isinstance(outer, cst.SimpleStatementSuite):  # a statement in the line of an `if`
            return outer
        if isinstance(outer, cst.BaseStatement):
            return program.parent(outer)
    return None


def _end(program: Program, call: cst.CSTNode) -> cst.CSTNode:
    """Returns the last call of the chain that a node begins."""
    while True:
        attribute = program.parent(call)
        outer = program.parent(attribute) if isinstance(attribute, cst.Attribute) else None
        if not isinstance(outer, cst.Call) or outer.func is not attribute:
            return call
        call = outer


def _name_of(program: Program, end: cst.Call) -> cst.Name | None:
    """Returns the name to which a chain is assigned; None if there is none."""
    statement = program.parent(end)
    if isinstance(statement, cst.Assign) and len(statement.targets) == 1:
        target = statement.targets[0].target
        return target if isinstance(target, cst.Name) else None
    return None


def _is_read_by_strategy(program: Program, node: cst.CSTNode) -> bool:
    """Returns whether the reader of a dataset is a strategy, or a function for one."""
    outer = program.parent(node)
    if (call := program.call_of_argument(node)) is not None:
        return method_name(call) in _DISTRIBUTES and call.args[0] is outer
    if not isinstance(outer, cst.Return | cst.Lambda):
        return False
    function = next(x for x in program.around(node) if isinstance(x, cst.FunctionDef | cst.Lambda))
    if isinstance(function, cst.Lambda):
        return _is_called_by_strategy(program, function)
    references = program.references(function.name)
    return bool(references) and all(
        _is_called_by_strategy(program, reference) for reference in references
    )


def _is_called_by_strategy(program: Program, function: cst.CSTNode) -> bool:
    return method_name(program.call_of_argument(function)) in _CALLS
