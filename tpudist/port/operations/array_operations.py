"""Replaces operations on arrays by functions of JAX or Keras with the same results.

On replicas they become functions of `jax.numpy`, and in Keras objects functions of `keras.ops`. In
other code, an argument may be a tensor of a `tf.data` pipeline or a list, which `jnp.asarray`
converts. `templates` writes the new expression.
"""

from __future__ import annotations

import dataclasses
import re

import libcst as cst

from tpudist.port.analysis.function_roles import Role
from tpudist.port.analysis.nodes import function_name, method_name, nodes_in
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer, with_parentheses_of
from tpudist.port.analysis.value_flow import ValueFlow
from tpudist.port.analysis.value_kinds import ValueKinds
from tpudist.port.operations.helper_functions import HELPERS, with_helpers
from tpudist.port.operations.irregular_operations import (
    IRREGULAR,
    SAME_ARGUMENTS,
    Call,
    Irregular,
)
from tpudist.port.operations.operation_table import (
    CLIPS_BY_NORM,
    OPERATIONS,
    RANDOM,
    Operation,
    for_keras,
)
from tpudist.port.operations.templates import (
    bind,
    count_places,
    fill_template,
    in_parentheses,
    is_simple,
    loop_names,
    names_in,
    parse_template,
)
from tpudist.port.tensorflow_names import DTYPES

# A comment above statements that clip by a norm on replicas.
_CLIP_COMMENT = (
    "# Each replica clips by the norm of its own gradients before the sum over replicas, as with",
    "# tf.distribute. To get the result of one device, clip after the sum.",
)
# Name for an argument that a template reads more than once.
_SHARED_VALUE = "values"
# The longest chain of names and operands that is followed, which also ends recursion.
_DEPTH = 9


@dataclasses.dataclass(frozen=True)
class _Target:
    """The replacement of a call.

    Attributes:
        template: The expression, with `_x` for the argument `x`.
        parameters: Parameters of the operation, with their defaults.
        arrays: Parameters that must be arrays.
        handled: Parameters whose arguments need no place in the template.
    """

    template: str
    parameters: dict[str, str | None]
    arrays: frozenset[str]
    handled: frozenset[str] = frozenset()


class ArrayOperations(Transformer):
    """Rewrites operations, by the place where they run."""

    def __init__(self, program: Program):
        super().__init__(program)
        self._kinds = ValueKinds(program)
        self._flow = ValueFlow(program, self.roles)
        self._targets: dict[cst.Call, _Target | None] = {}
        self._clips: set[cst.CSTNode] = set()  # statements that clip by a norm on replicas
        self._helpers: dict[str, str] = {}  # functions to add: name in the table -> new name

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        """Adds the functions that replacements call."""
        return with_helpers(updated_node, self._helpers) if self._helpers else updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        """Adds a comment to a statement that clips by a norm."""
        if original_node not in self._clips:
            return updated_node
        lines = [cst.EmptyLine(comment=cst.Comment(line)) for line in _CLIP_COMMENT]
        return updated_node.with_changes(leading_lines=[*updated_node.leading_lines, *lines])

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Rewrites one operation."""
        if (name := self._same_function(original_node)) is not None:
            return self._with_arrays(original_node, updated_node, name)
        if (target := self._target(original_node)) is None:
            return updated_node
        if (
            self.program.callee(original_node) in CLIPS_BY_NORM
            and self.roles.of(original_node) is Role.REPLICA
        ):
            around = self.program.around(original_node)
            self._clips |= {x for x in around if isinstance(x, cst.SimpleStatementLine)}
        values = self._arguments(target, original_node, updated_node)
        args = bind(updated_node, target.parameters) or {}
        keywords = {name for name, arg in args.items() if arg.keyword}
        filled = self._fill(target.template, values, keywords)
        # At these places an expression needs no parentheses, whatever it is.
        places = cst.Arg | cst.Assign | cst.AugAssign | cst.Return | cst.Element | cst.Expr
        if not updated_node.lpar and not isinstance(self.program.parent(original_node), places):
            filled = in_parentheses(filled)
        if updated_node.lpar and not isinstance(filled, cst.Tuple):
            filled = with_parentheses_of(filled, updated_node)
        return filled

    def _arguments(
        self, target: _Target, original: cst.Call, updated: cst.Call
    ) -> dict[str, cst.BaseExpression]:
        """Returns the values for the template: arrays, tuples of axes, and written defaults."""
        args, originals = bind(updated, target.parameters), bind(original, target.parameters)
        assert args is not None
        assert originals is not None
        values = {name: arg.value for name, arg in args.items() if name not in target.handled}
        for name, value in values.items():
            before = originals[name].value
            if name in target.arrays:
                # A list with only starred elements is a list of arrays.
                is_starred = isinstance(value, cst.List) and all(
                    isinstance(x, cst.StarredElement) for x in value.elements
                )
                if not is_starred and self._needs_array(before, target.template):
                    values[name] = self._as_array(value)
            elif name in ("values", "inputs") and isinstance(value, cst.List | cst.Tuple):
                assert isinstance(before, cst.List | cst.Tuple)
                values[name] = self._list_of_arrays(before, value, target.template)
            elif name in ("axis", "axes", "shift"):
                values[name] = self._as_tuple(before, value)
        for name, default in target.parameters.items():
            if default and name not in values:
                values[name] = cst.parse_expression(default)
        return values

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Rewrites dtypes, `tf.newaxis`, and the type of arrays."""
        name = self.program.name(original_node)
        if not name.startswith("tensorflow."):
            return updated_node
        name = name.removeprefix("tensorflow.").removeprefix("dtypes.")
        role = self.roles.of(original_node)
        if name == "newaxis" and role is not Role.DATASET:
            return with_parentheses_of(cst.Name("None"), updated_node)
        if name == "Tensor" and any(
            isinstance(x, cst.Annotation) for x in self.program.around(original_node)
        ):
            return self.write("jax.Array", updated_node)
        if name not in (*DTYPES, "string") or role in (Role.DATASET, None):
            return updated_node
        call = self.program.call_of_argument(original_node)
        called = self.program.callee(call) if call is not None else ""
        target = self._target(call) if call is not None else None
        template = target.template if target is not None else ""
        if template.startswith("keras.") or called.startswith(("tensorflow.keras.", "keras.")):
            return cst.SimpleString(f'"{name}"')
        if name == "string" or (called.startswith("tensorflow.") and target is None):
            return updated_node
        if self._is_argument_of_tensorflow(original_node):
            return updated_node
        return self.write(f"jnp.{name}", updated_node)

    def _same_function(self, call: cst.Call) -> str | None:
        """Returns the function with the same arguments that replaces a call's function."""
        name = SAME_ARGUMENTS.get(self.program.callee(call))
        role = self.roles.of(call)
        if name is None or role in (Role.DATASET, None) or self._is_argument_of_tensorflow(call):
            return None
        if any(arg.keyword and arg.keyword.value != "indexing" for arg in call.args):
            return None
        return name.replace("jnp.", "keras.ops.") if role is Role.KERAS else name

    def _with_arrays(self, original: cst.Call, updated: cst.Call, name: str) -> cst.Call:
        args = []
        for before, arg in zip(original.args, updated.args, strict=True):
            is_string = isinstance(before.value, cst.BaseString)
            stays = is_string or name.startswith("keras.") or before.star or before.keyword
            if not stays and self._needs_array(before.value, name):
                arg = arg.with_changes(value=self._as_array(arg.value))
            args.append(arg)
        return updated.with_changes(func=self.write(name, updated.func), args=args)

    def _list_of_arrays(
        self, original: cst.List | cst.Tuple, updated: cst.List | cst.Tuple, template: str
    ) -> cst.List | cst.Tuple:
        """Returns a list whose elements are arrays, if the template joins them."""
        if not template.startswith(("jnp.concatenate", "jnp.stack", "sum(")):
            return updated
        elements = []
        for before, element in zip(original.elements, updated.elements, strict=True):
            if isinstance(before, cst.Element) and self._needs_array(before.value, template):
                element = element.with_changes(value=self._as_array(element.value))
            elements.append(element)
        return updated.with_changes(elements=elements)

    def _as_array(self, value: cst.BaseExpression) -> cst.Call:
        return cst.Call(self.write("jnp.asarray"), [cst.Arg(value)])

    def _target(self, call: cst.Call) -> _Target | None:
        """Returns the replacement of an operation; None if it stays."""
        if call not in self._targets:
            self._targets[call] = self._find_target(call)
        return self._targets[call]

    def _find_target(self, call: cst.Call) -> _Target | None:
        name = self.program.callee(call)
        if name.startswith("keras.backend."):
            name = f"tensorflow.{name}"
        operation = OPERATIONS.get(name) or IRREGULAR.get(name)
        role = self.roles.of(call)
        if operation is None or role in (Role.DATASET, None):
            return None
        if self._is_argument_of_tensorflow(call) or self._flow.needs_tensor(call):
            return None
        # On replicas, random numbers need a key for each replica and step, which only the author
        # can choose.
        if name in RANDOM and role is not Role.HOST:
            return None
        # A constant of strings stays: no device can store it.
        if name == "tensorflow.constant" and call.args:
            if any(True for _ in nodes_in(call.args[0].value, cst.SimpleString)):
                return None
        if (args := bind(call, operation.parameters)) is None:
            return None
        if isinstance(operation, Irregular):
            target = self._irregular_target(operation, call, args)
        else:
            target = self._regular_target(operation, call)
        if not target.template:
            return None
        args = {key: arg for key, arg in args.items() if key not in target.handled}
        return target if self._can_fill(target, args) else None

    def _irregular_target(
        self, operation: Irregular, call: cst.Call, args: dict[str, cst.Arg]
    ) -> _Target:
        role = Role.KERAS if self._prefers_keras(call) else self.roles.of(call)
        values = {key: arg.value for key, arg in args.items()}
        described = Call(self.program, self._kinds, role, call, values)
        template = operation.choose(described)
        if role is Role.KERAS:
            template = for_keras(template.replace("jnp.astype(", "keras.ops.cast("))
        handled = frozenset(described.handled)
        return _Target(template, operation.parameters, operation.arrays, handled)

    def _regular_target(self, operation: Operation, call: cst.Call) -> _Target:
        template = operation.keras if self._prefers_keras(call) else operation.jax
        # In a function that builds a model, `keras.ops` are preferred. `jnp` is the fallback,
        # because the arrays may be symbolic only in other calls.
        if not template and self.roles.of(call) is Role.HOST:
            template = operation.jax
        return _Target(template, operation.parameters, operation.arrays)

    def _prefers_keras(self, call: cst.Call) -> bool:
        """Returns whether a call may get symbolic tensors, which `keras.ops` accept like arrays."""
        role = self.roles.of(call)
        return role is Role.KERAS or (role is Role.HOST and self.roles.builds_model(call))

    def _can_fill(self, target: _Target, args: dict[str, cst.Arg]) -> bool:
        """Returns whether the template has a place for each argument, and computes it once."""
        names = count_places(target.template)
        if any(name not in names for name in args):
            return False
        for name, times in names.items():
            if name not in args and target.parameters.get(name) is None:
                return False
            if times > 1 and name in args:
                # An argument with two places is computed once: it is a name, or gets one in its
                # first place by `name := value`.
                value = args[name].value
                is_named = is_simple(value) and not (
                    name in target.arrays and self._needs_array(value, target.template)
                )
                is_loop = " for " in target.template
                if not is_named and (is_loop or not self._can_name(value)):
                    return False
        return True

    def _can_name(self, value: cst.BaseExpression) -> bool:
        """Returns whether `name := value` is allowed in place of a value."""
        return not any(isinstance(outer, cst.BaseComp) for outer in self._expression_around(value))

    def _expression_around(self, value: cst.CSTNode) -> list[cst.CSTNode]:
        found = []
        for outer in self.program.around(value):
            if isinstance(outer, cst.BaseSmallStatement | cst.BaseStatement):
                break
            found.append(outer)
        return found

    def _needs_array(self, value: cst.BaseExpression, template: str) -> bool:
        """Returns whether a value may be an object that JAX does not accept as an array."""
        if "_input.shape" in template:  # chosen only for a value that has a shape
            return False
        # These accept every object.
        if template.startswith(("keras.", "jnp.asarray(", "jax.lax.map", "jax.vmap")):
            return False
        if self._kinds.is_number(value):
            return ".at[" in template  # the one method in templates that a Python number lacks
        # `jnp` rejects lists. Other values on replicas are arrays.
        if self._kinds.may_be_list(value):
            return not (isinstance(value, cst.Call) and self._is_ported_to_array(value))
        if self.roles.of(value) not in (Role.HOST, Role.BOTH):
            return False
        return not self._is_array(value)

    def _is_ported_to_array(self, value: cst.Call) -> bool:
        target = self._target(value)
        return target is not None and not target.template.startswith(("jnp.split", "list("))

    def _is_array(self, value: cst.BaseExpression, depth: int = 0) -> bool:
        """Returns whether a value in Python is certainly a number or an array of JAX or NumPy."""
        if depth > _DEPTH:
            return False
        if self._kinds.is_number(value):
            return True
        if isinstance(value, cst.BinaryOperation):
            return self._is_array(value.left, depth + 1) and self._is_array(value.right, depth + 1)
        if isinstance(value, cst.UnaryOperation):
            return self._is_array(value.expression, depth + 1)
        if isinstance(value, cst.Call):
            if (name := self.program.callee(value)).startswith(("numpy.", "jax.")):
                return True
            if name.startswith("tensorflow."):
                target = self._target(value)
                return target is not None and not self._kinds.may_be_list(value)
            # `strategy.reduce`, `strategy.gather` and `metric.result` return arrays.
            return method_name(value) in ("reduce", "gather", "result")
        return self.program.has_only(value, lambda x: self._is_array(x, depth + 1))

    def _as_tuple(
        self, original: cst.BaseExpression, axis: cst.BaseExpression
    ) -> cst.BaseExpression:
        """Returns several axes as a tuple, which JAX requires; TensorFlow also accepts a list."""
        if isinstance(axis, cst.List):
            elements = list(axis.elements)
            if len(elements) == 1:
                elements = [elements[0].with_changes(comma=cst.Comma())]
            return cst.Tuple(elements, lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        if isinstance(axis, cst.Call) and function_name(axis) == "list" and len(axis.args) == 1:
            return axis.with_changes(func=cst.Name("tuple"))
        is_range = function_name(axis) in ("list", "range")
        if is_range or self._kinds.may_be_list(original):
            return cst.Call(cst.Name("tuple"), [cst.Arg(axis)])
        return axis

    def _fill(
        self, template: str, values: dict[str, cst.BaseExpression], keywords: set[str]
    ) -> cst.BaseExpression:
        """Returns the expression of a template with these arguments."""
        twice = {
            name
            for name, times in count_places(template).items()
            if times > 1 and name in values and not is_simple(values[name])
        }
        # New names must not hide names that the arguments read.
        taken = {x for value in values.values() for x in names_in(value)}
        names: dict[str, str] = {}
        for name in sorted(twice):
            names[name] = self.program.free_name(_SHARED_VALUE, taken)
            taken.add(names[name])
        names |= {x: self.program.free_name(x, taken) for x in loop_names(template) & taken}
        for helper in HELPERS.keys() & names_in(parse_template(template)):
            names[helper] = self._helpers[helper] = self.program.free_name(helper)
        written = " ".join([template, *(HELPERS[x] for x in self._helpers)])
        for module in ("jnp", "jax", "np", "keras", "optax"):
            if re.search(rf"\b{module}\.", written):
                self.imports.add(module)
        return fill_template(template, values, keywords, names)

    def _is_argument_of_tensorflow(self, node: cst.CSTNode) -> bool:
        """Returns whether `tf.data`, `tf.io` or a TensorSpec that stays has a node as argument."""
        for outer in self._expression_around(node):
            name = self.program.callee(outer)
            if name.startswith(("tensorflow.data.", "tensorflow.TensorSpec", "tensorflow.io.")):
                assert isinstance(outer, cst.Call)
                if name != "tensorflow.TensorSpec" or not self._target(outer):
                    return True
        return False
