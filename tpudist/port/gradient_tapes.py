"""Turns gradient tapes into functions that `tpudist.keras.value_and_grad` differentiates.

This is safe if only the statement after the tape uses it, if that computes the gradients of a loss
from the tape, and if the recorded code can be in a function.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import libcst as cst
from libcst import metadata

from tpudist.port.analysis.function_roles import Role
from tpudist.port.analysis.keras_objects import (
    is_called_as_model,
    is_model,
    is_optimizer,
    is_without_keras,
    makes_model,
)
from tpudist.port.analysis.nodes import keyword_arg, nodes_in
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer

_TAPE = "tensorflow.GradientTape"
_TRAINED = {"trainable_variables", "trainable_weights"}
_NAME = "loss_of_batch"
# Nodes that have another meaning in a function of their own: `return` and `yield` would leave it,
# `break` and `continue` have no loop in it, `await` needs an async function, and `del`, `global`
# and `nonlocal` would act on its own names.
_OF_FUNCTION = (cst.Return, cst.Yield, cst.Break, cst.Continue, cst.Await, cst.Del)
_OF_FUNCTION += (cst.Global, cst.Nonlocal)


@dataclasses.dataclass(frozen=True)
class _Tape:
    """A tape and the statement after it, which computes the gradients.

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
        super().__init__(program)
        self._has_keras_model = program.once(makes_model)
        self._is_without_keras = program.once(is_without_keras)

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """Rewrites the tapes of a block."""
        # Facts belong to the original nodes, and the code that is written to the updated ones, in
        # which inner statements have changed. Both have the same statements unless another change
        # removed one, and then the pairs would be wrong.
        before, after = list(original_node.body), list(updated_node.body)
        if self._is_without_keras or len(before) != len(after):
            return updated_node
        body: list[Any] = []
        for i, statement in enumerate(before):
            tape = self._parse_tape(statement, before[i + 1]) if i + 1 < len(before) else None
            if tape is not None:
                body += self._function_and_call(tape, after[i], after[i + 1])
            # The statement after a tape was written with it. `_parse_tape` is a function of two
            # nodes only, so it gives the same answer again.
            elif i == 0 or self._parse_tape(before[i - 1], statement) is None:
                body.append(after[i])
        return updated_node.with_changes(body=body)

    def _parse_tape(self, statement: cst.CSTNode, following: cst.CSTNode) -> _Tape | None:
        """Returns the parts of a tape; None if the node is not a tape, or a part is uncertain."""
        if not isinstance(statement, cst.With) or len(statement.items) != 1:
            return None
        [item] = statement.items
        value = item.item
        if not isinstance(value, cst.Call) or value.args or self.program.callee(value) != _TAPE:
            return None
        if item.asname is None:
            return None
        name, assign = item.asname.name, _assignment(following)
        if not isinstance(name, cst.Name) or assign is None:
            return None
        call = assign.value
        if not (
            isinstance(call, cst.Call)
            and isinstance(call.func, cst.Attribute)
            and call.func.attr.value == "gradient"
            # The tape has no other reader: `tape.watch`, a second `gradient` or a nested use would
            # be lost.
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
        bound = self._bound_names(statement)
        if loss.value not in bound:
            return None
        if not self._is_of_keras(variables.value, assign.targets[0].target):
            return None
        others = tuple(x for x, is_read in bound.items() if is_read and x != loss.value)
        if not all(self._is_always_bound(statement, x) for x in (loss.value, *others)):
            return None
        source = variables.value
        # `value_and_grad` accepts a model, or a function that returns variables. A lambda reads
        # them after `fn` has run, when a model that is built by its first call has them.
        if not is_model(self.program, source):
            source = cst.Lambda(cst.Parameters(), variables)
        return _Tape(loss.value, assign.targets[0].target, source, others)

    def _is_of_keras(self, model: cst.BaseExpression, gradients: cst.CSTNode) -> bool:
        """Returns whether a Keras model has the variables, or a Keras optimizer updates them."""
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
        """Returns whether the recorded code can be in a function."""
        if self.roles.of(statement) is not Role.REPLICA:
            return False
        for outer in self.program.around(statement):
            if isinstance(outer, cst.FunctionDef):
                break
            # A loop may carry names from one round to the next, which would be local to the new
            # function. In a class, a function does not see the names of the body.
            if isinstance(outer, cst.For | cst.While | cst.ClassDef):
                return False
        else:  # not in a function
            return False
        if not isinstance(statement.body, cst.IndentedBlock):
            return False
        inside = _subtree(statement.body)
        if any(isinstance(x, _OF_FUNCTION) or self.program.callee(x) == _TAPE for x in inside):
            return False
        # A name that was bound before the tape would become a local of the new function, and
        # reading it before its assignment there an UnboundLocalError.
        line = self.program.line(statement)
        return not any(
            self.program.line(binding.node) < line
            and not isinstance(binding, metadata.ImportAssignment)
            for name in self._bound_names(statement)
            for binding in self._assignments(statement, name)
        )

    def _bound_names(self, statement: cst.With) -> dict[str, bool]:
        """Returns the names that the recorded code binds, and whether code outside reads them."""
        inside = _subtree(statement.body)
        scope = self.program.scope(statement.body.body[0])
        found: dict[str, bool] = {}
        for binding in scope.assignments if scope is not None else ():
            if not isinstance(binding, metadata.Assignment) or binding.node not in inside:
                continue
            reads = [access.node for access in binding.references if access.node not in inside]
            if self._is_walrus(binding):
                # The port itself names values by `:=`, and reads them in the same statement. A
                # statement elsewhere that does so with this name does not read the one of the tape.
                reads = [x for x in reads if not self._names_value(x, binding.name)]
                if not reads:
                    continue
            found[binding.name] = found.get(binding.name, False) or bool(reads)
        return found

    def _is_walrus(self, binding: metadata.Assignment) -> bool:
        return isinstance(self.program.parent(binding.node), cst.NamedExpr)

    def _names_value(self, read: cst.CSTNode, name: str) -> bool:
        """Returns whether the statement that reads a name binds it by `:=`."""
        around = self.program.around(read)
        statement = next(
            x for x in around if isinstance(x, cst.BaseSmallStatement | cst.BaseStatement)
        )
        bound = nodes_in(statement, cst.NamedExpr)
        return any(isinstance(x.target, cst.Name) and x.target.value == name for x in bound)

    def _is_always_bound(self, statement: cst.With, name: str) -> bool:
        """Returns whether the recorded code always binds a name, not only in a branch or loop."""
        # Python may skip a `:=`, as in `a and (b := c)`.
        bindings = self._assignments(statement, name)
        return self._binds(statement.body, {x.node for x in bindings if not self._is_walrus(x)})

    def _binds(self, block: cst.CSTNode, nodes: set[cst.CSTNode]) -> bool:
        """Returns whether every path through a block binds one of some nodes."""
        body = block.body if isinstance(block, cst.IndentedBlock | cst.SimpleStatementSuite) else ()
        for statement in body:
            if isinstance(statement, cst.If):
                if statement.orelse is not None and self._binds_in_all(statement, nodes):
                    return True
            elif isinstance(statement, cst.With):
                if self._binds(statement.body, nodes):
                    return True
            # A loop may have no rounds, and a `try` may end early: what they bind is not certain.
            elif not isinstance(statement, cst.For | cst.While | cst.Try | cst.Match):
                if not nodes.isdisjoint(_subtree(statement)):
                    return True
        return False

    def _binds_in_all(self, branch: cst.If, nodes: set[cst.CSTNode]) -> bool:
        """Returns whether all branches of a condition bind a node; the last must be `else`."""
        last = branch.orelse
        if last is None or not self._binds(branch.body, nodes):
            return False
        if isinstance(last, cst.If):
            return self._binds_in_all(last, nodes)
        return self._binds(last.body, nodes)

    def _assignments(self, statement: cst.With, name: str) -> list[metadata.Assignment]:
        scope = self.program.scope(statement.body.body[0])
        found = scope.assignments[name] if scope is not None else ()
        return [binding for binding in found if isinstance(binding, metadata.Assignment)]

    def _function_and_call(
        self, tape: _Tape, statement: Any, following: Any
    ) -> list[cst.BaseStatement]:
        """Returns a function, and the statement that calls it."""
        name = self.program.free_name(_NAME)
        value: cst.BaseExpression = cst.Name(tape.loss)
        result: cst.BaseExpression = cst.Name(tape.loss)
        options = []
        if tape.others:
            rest = [cst.Name(x) for x in tape.others]
            other = rest[0] if len(rest) == 1 else _tuple(rest, parenthesized=True)
            value = _tuple([value, other])
            result = _tuple([result, other], parenthesized=True)
            options = [keyword_arg("has_aux", cst.Name("True"))]
        last = cst.SimpleStatementLine([cst.Return(value)])
        function = cst.FunctionDef(
            cst.Name(name),
            cst.Parameters(),
            statement.body.with_changes(body=[*statement.body.body, last]),
            leading_lines=statement.leading_lines,
        )
        args = [cst.Arg(cst.Name(name)), cst.Arg(tape.variables), *options]
        compute = cst.Call(self.write("tpudist.keras.value_and_grad"), args)
        target = cst.AssignTarget(_tuple([result, tape.gradients]))
        assign = cst.Assign([target], cst.Call(compute))
        lines = following.leading_lines or [cst.EmptyLine(indent=False)]
        return [function, following.with_changes(body=[assign], leading_lines=lines)]


def _subtree(node: cst.CSTNode) -> set[cst.CSTNode]:
    """Returns a node and all nodes inside it."""
    return set(nodes_in(node, cst.CSTNode))


def _assignment(statement: cst.CSTNode) -> cst.Assign | None:
    """Returns `name = expression` with one target, if it is alone in its line."""
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        [part] = statement.body
        if isinstance(part, cst.Assign) and len(part.targets) == 1:
            return part
    return None


def _tuple(parts: list[Any], *, parenthesized: bool = False) -> cst.Tuple:
    brackets = {} if parenthesized else {"lpar": [], "rpar": []}
    return cst.Tuple([cst.Element(x) for x in parts], **brackets)
