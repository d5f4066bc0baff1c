"""Lists the names of TensorFlow that a ported program still has, and marks them in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import libcst as cst

from tpudist.port.analysis.function_roles import Role, Roles
from tpudist.port.analysis.keras_objects import (
    has_servers,
    is_called_as_model,
    is_in_module,
    is_without_keras,
    makes_model,
)
from tpudist.port.analysis.nodes import code_of, method_name, nodes_in
from tpudist.port.analysis.program import Program
from tpudist.port.guide_sections import (
    CAPTURED,
    KERAS_MODULE,
    KERAS_TAPE,
    MODULE_VARIABLE,
    NO_KERAS,
    OLD_LEARNING_RATE,
    RANDOM_VALUE,
    RESULT,
    SCALED_LOSS,
    SERVERS_CAPTURED,
    SERVERS_TAPE,
    STAR,
    Advice,
    advise,
)
from tpudist.port.learning_rates import is_old_rate
from tpudist.port.operations.signatures import is_signature
from tpudist.port.saved_files import find_wrong_accesses
from tpudist.port.tensorflow_names import STAYS, is_in_keras

# A mark, as the port writes it above a statement:
#   # tpudist port: tf.Module, tf.py_function (docs/porting.md#names)
# A second port removes marks by this prefix, and writes the marks that still apply.
MARK = "# tpudist port:"

# Methods that change a Keras object.
_UPDATING_METHODS = {"apply", "apply_gradients", "update_state"}
_RESULT = "result"
# Methods of loss scale optimizers that Keras 3 does not have.
_SCALES = {"get_scaled_loss", "get_unscaled_gradients"}
_TRAINABLE = (".trainable_variables", ".trainable_weights")
# Ends of names of functions, which have no state.
_FUNCTION_ENDINGS = ("fn", "func", "function", "loss")
_GRADIENTS = "tpudist.keras.value_and_grad"
_TRAINING_METHODS = {"evaluate", "fit", "predict"}
# A callback that writes with `tf.summary`.
_TENSORBOARD = "keras.callbacks.TensorBoard"
# Prefixes of functions whose results have no state of Keras.
_STATELESS = ("keras.losses.", "tpudist.", "jax.", "flax.", "optax.", "numpy.", "functools.")


@dataclasses.dataclass(frozen=True)
class Leftover:
    """A name to port manually.

    Attributes:
        line: Line in the ported program, from 1.
        name: Name, as the program writes it.
        instruction: Imperative clause for the list of leftovers.
        section: Section of the guides that shows it.
        cell: Number of the cell in a notebook, from 1; `line` is then a line of the cell.
    """

    line: int
    name: str
    instruction: str
    section: str
    cell: int | None = None


class Leftovers:
    """Finds the leftovers of a program, and the names of TensorFlow that may stay."""

    def __init__(self, program: Program):
        self._program = program
        self._roles = program.once(Roles)
        self._has_keras_model = program.once(makes_model)
        self.found: list[tuple[cst.CSTNode, str, Advice]] = []
        self.stays: set[str] = set()
        self._training_calls: list[cst.Call] = []
        self._is_without_keras = program.once(is_without_keras)
        self._has_servers = self._is_without_keras and program.once(has_servers)
        # The names in imports are left out: they are found at their uses.
        skip = (cst.Import, cst.ImportFrom)
        for node in nodes_in(program.module, cst.CSTNode, skip=skip):
            if isinstance(node, cst.Name | cst.Attribute):
                self._check_name(node)
            elif isinstance(node, cst.Call):
                self._check_call(node)
            elif isinstance(node, cst.ImportFrom):
                self._check_import(node)
        if self._is_without_keras and program.imports("keras"):
            for call in self._training_calls:
                self._add(call.func, NO_KERAS)
        self.found += find_wrong_accesses(program)

    def _check_call(self, node: cst.Call) -> None:
        """Checks a call of a method, and the object that a replica calls or changes."""
        # A function of a module, `module.fit(...)`, is not a method.
        if isinstance(node.func, cst.Attribute) and not self._program.callee(node):
            if node.func.attr.value in _SCALES:
                self._add(node.func, SCALED_LOSS)
            elif node.func.attr.value in _TRAINING_METHODS:
                self._training_calls.append(node)
        self._check_captured_object(node)

    def _check_captured_object(self, node: cst.Call) -> None:
        """Finds objects that a replica changes and that may not be Keras objects, and results."""
        owner = node.func
        if isinstance(owner, cst.Attribute) and owner.attr.value in {*_UPDATING_METHODS, _RESULT}:
            owner = owner.value
        is_function = isinstance(owner, cst.Name) and owner.value.endswith(_FUNCTION_ENDINGS)
        if (
            isinstance(owner, cst.Name)
            and not (is_function and owner is node.func)
            and self._roles.of(node) is Role.REPLICA
            and self._may_be_keras_object(owner)
        ):
            is_keras = self._is_by_keras(owner) or self._has_keras_variables(node)
            if self._is_without_keras or not is_keras:
                self._add(node.func, SERVERS_CAPTURED if self._has_servers else CAPTURED)
            elif method_name(node) == _RESULT:
                self._add(node.func, RESULT)

    def _check_import(self, node: cst.ImportFrom) -> None:
        """Finds imports of private modules of TensorFlow, and of all names."""
        module = cst.Module([]).code_for_node(node.module) if node.module else ""
        if module.startswith("tensorflow.python"):
            self.found.append((node, module, advise(module)))
        elif module.startswith("tensorflow") and isinstance(node.names, cst.ImportStar):
            self.found.append((node, f"from {module} import *", STAR))

    def lines(self) -> list[Leftover]:
        """Returns one leftover for each line and name, in order."""
        # A name may be found twice in a line. The later advice wins; `find_wrong_accesses` is added
        # last, so its advice has priority.
        found = {(self._program.line(node), name): advice for node, name, advice in self.found}
        return [
            Leftover(line, name, advice.instruction, advice.section)
            for (line, name), advice in sorted(found.items())
        ]

    def _add(self, node: cst.BaseExpression, advice: Advice) -> None:
        name = code_of(node.with_changes(lpar=[], rpar=[]))
        self.found.append((node, name, advice))

    def _check_name(self, node: cst.Name | cst.Attribute) -> None:
        """Checks a dotted name, or the learning rate of an object that may be an optimizer."""
        if isinstance(node, cst.Attribute) and is_old_rate(self._program, node):
            self._add(node, OLD_LEARNING_RATE)
        outer = self._program.parent(node)
        # Only the longest name counts: `tf.nn.relu` contains the names `tf` and `tf.nn`.
        if isinstance(outer, cst.Attribute) and self._is_of_library(self._program.name(outer)):
            return  # a part of a longer name
        name = self._program.name(node)
        if not self._is_of_library(name):
            return
        if name.startswith("keras."):
            if name == _TENSORBOARD:
                self.stays.add(name)
            # The advice of `guide_sections` is listed by names of TensorFlow, in which Keras is
            # `tf.keras`.
            name = f"tensorflow.{name}"
            if is_in_keras(name.removeprefix("tensorflow.keras.")):
                return
        if self._roles.of(node) is Role.DATASET:
            self.stays.add("tf.data")
        elif name == "tensorflow.name_scope" and self._program.uses("tensorflow.summary."):
            self.stays.add("tf.summary")
        elif name.startswith(STAYS):
            self.stays.add(f"tf.{name.split('.')[1]}")
        elif not self._is_of_dataset(node):
            self._add(node, self._advise(name, node))

    def _is_of_library(self, name: str) -> bool:
        return name == "tensorflow" or name.startswith(("tensorflow.", "keras."))

    def _advise(self, name: str, node: cst.Name | cst.Attribute) -> Advice:
        """Returns the advice for a name, which may depend on the rest of the program."""
        if name == "tensorflow.GradientTape" and self._has_servers:
            return SERVERS_TAPE
        if name == "tensorflow.GradientTape" and self._has_keras_model:
            return KERAS_TAPE
        if name == "tensorflow.Module" and self._program.uses(_GRADIENTS):
            return KERAS_MODULE
        if name == "tensorflow.Variable" and is_in_module(self._program, node):
            return MODULE_VARIABLE
        if name.startswith("tensorflow.random.") and self._is_first_value(node):
            return RANDOM_VALUE
        return advise(name)

    def _may_be_keras_object(self, name: cst.Name) -> bool:
        """Returns whether a name is captured, with values from Keras or from unknown functions."""
        scopes = {assignment.scope for assignment in self._program.assignments(name)}
        if self._program.scope(name) in scopes or not self._program.imports("keras"):
            return False
        return self._program.has_only(
            name,
            lambda x: (
                isinstance(x, cst.Call) and not self._program.callee(x).startswith(_STATELESS)
            ),
        )

    def _is_by_keras(self, name: cst.Name) -> bool:
        """Returns whether an object, or the program's model, is certainly a Keras object."""
        values = self._program.values(name)  # not empty, as `_may_be_keras_object` has found
        return (
            self._has_keras_model
            or is_called_as_model(self._program, name)
            or all(self._program.callee(value).startswith("keras.") for value in values)
            or any(
                self._program.callee(outer) == _GRADIENTS
                for read in self._program.references(name)
                for outer in self._program.around(read)
            )
        )

    def _has_keras_variables(self, call: cst.Call) -> bool:
        """Returns whether a call updates an optimizer with the variables of a Keras model."""
        return method_name(call) in _UPDATING_METHODS and any(
            name in code_of(call) for name in _TRAINABLE
        )

    def _is_first_value(self, node: cst.CSTNode) -> bool:
        """Returns whether a node is in the first value of a variable that Python creates."""
        return self._roles.of(node) is Role.HOST and any(
            self._program.callee(outer) in ("tensorflow.Variable", "tpudist.Variable")
            for outer in self._program.around(node)
        )

    def _is_of_dataset(self, node: cst.CSTNode) -> bool:
        """Returns whether a node is an argument of a dataset that remains TensorFlow's."""
        for outer in self._program.around(node):
            if isinstance(outer, cst.BaseStatement | cst.FunctionDef | cst.Lambda):
                return False
            if self._program.callee(outer) == "tensorflow.TensorSpec" and is_signature(
                self._program, outer
            ):
                is_left = any(
                    self._program.callee(x) == "tensorflow.function"
                    for x in self._program.around(outer)
                )
                if not is_left:
                    self.stays.add("tf.TensorSpec")
                    return True
            if isinstance(outer, cst.Call) and self._program.callee(outer).startswith(
                "tensorflow.data."
            ):
                return True
        return False


class Unmark(cst.CSTTransformer):
    """Removes the marks of an earlier port."""

    def leave_EmptyLine(
        self, original_node: cst.EmptyLine, updated_node: cst.EmptyLine
    ) -> cst.EmptyLine | cst.RemovalSentinel:
        """Removes a line that is a mark."""
        comment = updated_node.comment
        if comment is not None and comment.value.startswith(MARK):
            return cst.RemoveFromParent()
        return updated_node


class Mark(cst.CSTTransformer):
    """Adds marks above each statement with leftovers, one for each section of the guides."""

    def __init__(self, leftovers: Leftovers, program: Program):
        super().__init__()
        names: dict[cst.CSTNode, dict[str, list[str]]] = {}
        for node, name, advice in leftovers.found:
            place = next(
                outer
                for outer in program.around(node)
                if isinstance(outer, cst.SimpleStatementLine | cst.BaseCompoundStatement)
            )
            listed = names.setdefault(place, {}).setdefault(advice.section, [])
            if name not in listed:
                listed.append(name)
        self._marks = {
            place: [f"{MARK} {', '.join(listed)} ({section})" for section, listed in by.items()]
            for place, by in names.items()
        }

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        """Adds the lines."""
        marks = self._marks.get(original_node)
        if marks:
            lines = [cst.EmptyLine(comment=cst.Comment(mark)) for mark in marks]
            updated_node = updated_node.with_changes(
                leading_lines=[*updated_node.leading_lines, *lines]
            )
        return super().on_leave(original_node, updated_node)
