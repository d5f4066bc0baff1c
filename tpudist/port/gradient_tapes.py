"""Gradient tapes: the recorded code becomes a function, which `value_and_grad` differentiates.

This is safe if the program asks the tape once, right after it, for the gradients of a loss that is
computed in it, and if the recorded code can be in a function.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import libcst as cst
from libcst import metadata

from tpudist.port.analysis.function_roles import Role, Roles
from tpudist.port.analysis.keras_objects import (
    is_called_as_model,
    is_model,
    is_optimizer,
    is_without_keras,
    makes_model,
)
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer

_TAPE = "tensorflow.GradientTape"
_TRAINED = {"trainable_variables", "trainable_weights"}
_NAME = "loss_of_batch"
# What a function of its own would take elsewhere.
_JUMPS = (cst.Return, cst.Yield, cst.Break, cst.Continue, cst.Await, cst.Del)
_JUMPS += (cst.Global, cst.Nonlocal)


@dataclasses.dataclass(frozen=True)
class _Tape:
    """A tape and the statement that asks it.

    Attributes:
        loss: Name of the loss.
        gradients: Name of the gradients.
        variables: Model, for its variables, or a function that returns them.
        others: Names that the recorded code binds and that later code reads.
    """

    loss: str
    gradients: cst.BaseAssignTargetExpression
    variables: cst.BaseExpression
    others: tuple[str, ...]


class GradientTapes(Transformer):
    """Rewrites the tapes in functions that replicas run."""

    def __init__(self, program: Program):
        """Finds where functions run."""
        super().__init__(program)
        self._roles = program.once(Roles)
        self._has_keras_model = program.once(makes_model)
        self._is_without_keras = program.once(is_without_keras)

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """A block with tapes in it."""
        before, after = list(original_node.body), list(updated_node.body)
        if self._is_without_keras or len(before) != len(after):
            return updated_node
        body: list[Any] = []
        for i, statement in enumerate(before):
            tape = self._read(statement, before[i + 1]) if i + 1 < len(before) else None
            if tape is not None:
                body += self._write(tape, after[i], after[i + 1])
            elif i == 0 or self._read(before[i - 1], statement) is None:
                body.append(after[i])
        return updated_node.with_changes(body=body)

    def _read(self, statement: cst.CSTNode, following: cst.CSTNode) -> _Tape | None:
        """Returns the parts of a tape; None if the node is not a tape, or a part is uncertain."""
        if not isinstance(statement, cst.With) or len(statement.items) != 1:
            return None
        [item] = statement.items
        made = item.item
        if not isinstance(made, cst.Call) or made.args or self.program.callee(made) != _TAPE:
            return None
        if item.asname is None:
            return None
        name, asked = item.asname.name, _assignment(following)
        if not isinstance(name, cst.Name) or asked is None:
            return None
        call = asked.value
        if not (
            isinstance(call, cst.Call)
            and isinstance(call.func, cst.Attribute)
            and call.func.attr.value == "gradient"
            and self.program.references(name) == [call.func.value]
            and len(call.args) == 2
            and not any(arg.keyword or arg.star for arg in call.args)
        ):
            return None
        loss, variables = (arg.value for arg in call.args)
        if not isinstance(variables, cst.Attribute) or variables.attr.value not in _TRAINED:
            return None
        if not isinstance(loss, cst.Name) or not self._can_move(statement):
            return None
        bound = self._names_of(statement)
        if loss.value not in bound:
            return None
        if not self._is_of_keras(variables.value, asked.targets[0].target):
            return None
        others = tuple(x for x, is_read in bound.items() if is_read and x != loss.value)
        if not all(self._is_always_bound(statement, x) for x in (loss.value, *others)):
            return None
        asks = (
            variables.value
            if is_model(self.program, variables.value)
            else cst.Lambda(cst.Parameters(), variables)
        )
        return _Tape(loss.value, asked.targets[0].target, asks, others)

    def _is_of_keras(self, model: cst.BaseExpression, gradients: cst.CSTNode) -> bool:
        """Whether variables are Keras' own: of its model, or given to an optimizer of it."""
        if self._has_keras_model or is_model(self.program, model):
            return True
        if is_called_as_model(self.program, model):
            return True
        reads = self.program.references(gradients) if isinstance(gradients, cst.Name) else []
        return any(
            isinstance(outer, cst.Call)
            and isinstance(outer.func, cst.Attribute)
            and outer.func.attr.value == "apply_gradients"
            and is_optimizer(self.program, outer.func.value)
            for read in reads
            for outer in self.program.around(read)
        )

    def _can_move(self, statement: cst.With) -> bool:
        """Whether what a tape records can stand in a function."""
        if self._roles.of(statement) is not Role.REPLICA:
            return False
        for outer in self.program.around(statement):
            if isinstance(outer, cst.FunctionDef):
                break
            if isinstance(outer, cst.For | cst.While | cst.ClassDef):
                return False
        else:
            return False
        if not isinstance(statement.body, cst.IndentedBlock):
            return False
        inside = _nodes_of(statement.body)
        if any(isinstance(x, _JUMPS) or self.program.callee(x) == _TAPE for x in inside):
            return False
        line = self.program.line(statement)
        return not any(
            self.program.line(one.node) < line and not isinstance(one, metadata.ImportAssignment)
            for name in self._names_of(statement)
            for one in self._assignments(statement, name)
        )

    def _names_of(self, statement: cst.With) -> dict[str, bool]:
        """The names that what a tape records binds, and whether they are read outside of it."""
        inside = _nodes_of(statement.body)
        scope = self.program.scope(statement.body.body[0])
        found: dict[str, bool] = {}
        for one in scope.assignments if scope is not None else ():
            if not isinstance(one, metadata.Assignment) or one.node not in inside:
                continue
            if not isinstance(self.program.parent(one.node), cst.NamedExpr):
                is_read = any(access.node not in inside for access in one.references)
                found[one.name] = found.get(one.name, False) or is_read
        return found

    def _is_always_bound(self, statement: cst.With, name: str) -> bool:
        """Whether what a tape records binds a name, and not only in a branch or a loop of it."""
        nodes = {one.node for one in self._assignments(statement, name)}
        return self._binds(statement.body, nodes)

    def _binds(self, block: cst.CSTNode, nodes: set[cst.CSTNode]) -> bool:
        """Whether a block binds one of some nodes however it is run through."""
        for statement in getattr(block, "body", ()):
            if isinstance(statement, cst.If):
                if statement.orelse is not None and self._binds_in_all(statement, nodes):
                    return True
            elif isinstance(statement, cst.With):
                if self._binds(statement.body, nodes):
                    return True
            elif not isinstance(statement, cst.For | cst.While | cst.Try | cst.Match):
                if not nodes.isdisjoint(_nodes_of(statement)):
                    return True
        return False

    def _binds_in_all(self, branch: cst.If, nodes: set[cst.CSTNode]) -> bool:
        """Whether all branches of a condition, of which the last is `else`, bind a node."""
        last = branch.orelse
        if last is None or not self._binds(branch.body, nodes):
            return False
        return (
            self._binds_in_all(last, nodes)
            if isinstance(last, cst.If)
            else self._binds(last.body, nodes)
        )

    def _assignments(self, statement: cst.With, name: str) -> list[metadata.Assignment]:
        scope = self.program.scope(statement.body.body[0])
        found = scope.assignments[name] if scope is not None else ()
        return [one for one in found if isinstance(one, metadata.Assignment)]

    def _write(self, tape: _Tape, statement: Any, following: Any) -> list[cst.BaseStatement]:
        """A function, and the statement that calls it."""
        name = self.program.free_name(_NAME)
        value: cst.BaseExpression = cst.Name(tape.loss)
        given: cst.BaseExpression = cst.Name(tape.loss)
        options = []
        if tape.others:
            rest = [cst.Name(x) for x in tape.others]
            other = rest[0] if len(rest) == 1 else _tuple(rest, parenthesized=True)
            value = _tuple([value, other])
            given = _tuple([given, other], parenthesized=True)
            equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
            options = [cst.Arg(cst.Name("True"), keyword=cst.Name("has_aux"), equal=equal)]
        result = cst.SimpleStatementLine([cst.Return(value)])
        function = cst.FunctionDef(
            cst.Name(name),
            cst.Parameters(),
            statement.body.with_changes(body=[*statement.body.body, result]),
            leading_lines=statement.leading_lines,
        )
        args = [cst.Arg(cst.Name(name)), cst.Arg(tape.variables), *options]
        compute = cst.Call(self.write("tpudist.keras.value_and_grad"), args)
        target = cst.AssignTarget(_tuple([given, tape.gradients]))
        assign = cst.Assign([target], cst.Call(compute))
        lines = following.leading_lines or [cst.EmptyLine(indent=False)]
        return [function, following.with_changes(body=[assign], leading_lines=lines)]


def _nodes_of(node: cst.CSTNode) -> set[cst.CSTNode]:
    """Returns a node and all nodes inside it."""
    found, left = set(), [node]
    while left:
        found.add(left[-1])
        left += left.pop().children
    return found


def _assignment(statement: cst.CSTNode) -> cst.Assign | None:
    """`name = expression` of one name, if that is all there is in the line."""
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        [one] = statement.body
        if isinstance(one, cst.Assign) and len(one.targets) == 1:
            return one
    return None


def _tuple(parts: list[Any], *, parenthesized: bool = False) -> cst.Tuple:
    brackets = {} if parenthesized else {"lpar": [], "rpar": []}
    return cst.Tuple([cst.Element(x) for x in parts], **brackets)
