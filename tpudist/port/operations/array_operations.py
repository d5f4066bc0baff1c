"""Replaces operations on arrays by the functions of JAX, or Keras, that compute the same.

On replicas they become those of `jax.numpy`, in Keras objects of `keras.ops`. In Python around
them an argument may be a tensor of a `tf.data` pipeline or a list, which `jnp.asarray` takes.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import libcst as cst

from tpudist.port.analysis.function_roles import Role, Roles
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.transformers import Transformer
from tpudist.port.analysis.value_flow import ValueFlow
from tpudist.port.analysis.value_kinds import ValueKinds
from tpudist.port.operations.helper_functions import HELPERS, with_helpers
from tpudist.port.operations.irregular_operations import IRREGULAR, SAME_ARGUMENTS, Call
from tpudist.port.operations.operation_table import (
    CLIPS_BY_NORM,
    OPERATIONS,
    RANDOM,
    Operation,
)

DTYPES = "bool bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32".split()
DTYPES += ["complex64", "complex128"]
# Keywords that mean the same here, and stay keywords.
_SAME = {"axis", "dtype", "keepdims"}
# Functions whose arguments have no names.
_BY_POSITION = ("jnp.astype",)
# The name of an operation in a graph, and the dtype of numbers of elements, which is int32 here.
_DROPS = {"name", "output_type", "out_type", "validate_indices"}
_NO_SPACE = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
# Above what clips by a norm on replicas.
_CLIPS = (
    "# Each replica clips by the norm of its own gradients before the sum over replicas, as with",
    "# tf.distribute. To get the result of one device, clip after the sum.",
)
# Name of a value that an expression reads twice.
_TWICE = "values"


@dataclasses.dataclass(frozen=True)
class _Target:
    """The replacement of a call.

    Attributes:
        template: The expression, with `_x` for the argument `x`.
        parameters: Parameters of the operation, with their defaults.
        arrays: Parameters that must be arrays.
        used: Parameters whose arguments the template already contains.
    """

    template: str
    parameters: dict[str, str | None]
    arrays: frozenset[str]
    used: frozenset[str] = frozenset()


class ArrayOperations(Transformer):
    """Rewrites operations by where they run."""

    def __init__(self, program: Program):
        """Finds where functions run."""
        super().__init__(program)
        self._roles = program.once(Roles)
        self._kinds = ValueKinds(program)
        self._flow = ValueFlow(program, self._roles)
        self._targets: dict[cst.Call, _Target | None] = {}
        self._clips: set[cst.CSTNode] = set()  # statements
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
        lines = [cst.EmptyLine(comment=cst.Comment(line)) for line in _CLIPS]
        return updated_node.with_changes(leading_lines=[*updated_node.leading_lines, *lines])

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """One operation."""
        if (name := self._namesake(original_node)) is not None:
            return self._with_arrays(original_node, updated_node, name)
        if (target := self._target(original_node)) is None:
            return updated_node
        if (
            self.program.callee(original_node) in CLIPS_BY_NORM
            and self._roles.of(original_node) is Role.REPLICA
        ):
            around = self.program.around(original_node)
            self._clips |= {x for x in around if isinstance(x, cst.SimpleStatementLine)}
        args = bind(updated_node, target.parameters)
        originals = bind(original_node, target.parameters)
        assert args is not None
        assert originals is not None
        values: dict[str, cst.BaseExpression] = {}
        for name, arg in args.items():
            if name in target.used:
                continue
            values[name] = arg.value
            original = originals[name].value
            if name in target.arrays:
                if isinstance(arg.value, cst.List) and all(
                    isinstance(x, cst.StarredElement) for x in arg.value.elements
                ):
                    continue
                if self._needs_array(original, target.template):
                    values[name] = self._as_array(arg.value)
            elif name in ("values", "inputs") and isinstance(arg.value, cst.List | cst.Tuple):
                assert isinstance(original, cst.List | cst.Tuple)
                values[name] = self._list_of_arrays(original, arg.value, target.template)
            elif name in ("axis", "axes", "shift"):
                values[name] = self._as_tuple(original, arg.value)
        for name, default in target.parameters.items():
            if default and name not in values:
                values[name] = cst.parse_expression(default)
        keywords = {name for name, arg in args.items() if arg.keyword}
        filled = self._fill(target.template, values, keywords)
        parentheses = {"lpar": updated_node.lpar, "rpar": updated_node.rpar}
        places = cst.Arg | cst.Assign | cst.AugAssign | cst.Return | cst.Element | cst.Expr
        if not updated_node.lpar and not isinstance(self.program.parent(original_node), places):
            filled = _in_parentheses(filled)
        if updated_node.lpar and not isinstance(filled, cst.Tuple):
            filled = filled.with_changes(**parentheses)
        return filled

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Dtypes, `tf.newaxis`, and the type of arrays."""
        name = self.program.name(original_node)
        if not name.startswith("tensorflow."):
            return updated_node
        name = name.removeprefix("tensorflow.").removeprefix("dtypes.")
        role = self._roles.of(original_node)
        if name == "newaxis" and role is not Role.DATASET:
            return cst.Name("None", lpar=updated_node.lpar, rpar=updated_node.rpar)
        if name == "Tensor" and self._is_annotation(original_node):
            return self.write("jax.Array", updated_node)
        if name not in (*DTYPES, "string") or role in (Role.DATASET, None):
            return updated_node
        call = self._call_around(original_node)
        called = self.program.callee(call) if call is not None else ""
        target = self._target(call) if call is not None else None
        template = target.template if target is not None else ""
        if template.startswith("keras.") or called.startswith(("tensorflow.keras.", "keras.")):
            return cst.SimpleString(f'"{name}"')
        if name == "string" or (called.startswith("tensorflow.") and target is None):
            return updated_node
        if self._is_of_tensorflow(original_node):
            return updated_node
        return self.write(f"jnp.{name}", updated_node)

    def _namesake(self, call: cst.Call) -> str | None:
        """The function of the same arguments that a call becomes one of."""
        name = SAME_ARGUMENTS.get(self.program.callee(call))
        role = self._roles.of(call)
        if name is None or role in (Role.DATASET, None) or self._is_of_tensorflow(call):
            return None
        if any(arg.keyword and arg.keyword.value != "indexing" for arg in call.args):
            return None
        return name.replace("jnp.", "keras.ops.") if role is Role.KERAS else name

    def _with_arrays(self, original: cst.Call, updated: cst.Call, name: str) -> cst.Call:
        args = []
        for before, arg in zip(original.args, updated.args, strict=True):
            is_text = isinstance(before.value, cst.BaseString)
            is_array = is_text or name.startswith("keras.") or before.star or before.keyword
            if not is_array and self._needs_array(before.value, name):
                arg = arg.with_changes(value=self._as_array(arg.value))
            args.append(arg)
        return updated.with_changes(func=self.write(name, updated.func), args=args)

    def _list_of_arrays(
        self, original: cst.List | cst.Tuple, updated: cst.List | cst.Tuple, template: str
    ) -> cst.List | cst.Tuple:
        """A list whose parts are arrays, where they are joined."""
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
        role = self._roles.of(call)
        operation, irregular = OPERATIONS.get(name), IRREGULAR.get(name)
        if (operation is None and irregular is None) or role in (Role.DATASET, None):
            return None
        if self._is_of_tensorflow(call) or not self._flow.ends_well(call):
            return None
        if name in RANDOM and role is not Role.HOST:
            return None
        if role is Role.HOST and self._roles.builds_model(call):
            role = Role.KERAS  # whose operations take arrays, too
        is_keras = role is Role.KERAS
        if irregular is not None:
            parameters, arrays, choose = irregular
            if (args := bind(call, parameters)) is None:
                return None
            given = {key: arg.value for key, arg in args.items()}
            described = Call(self.program, self._kinds, role, call, given)
            template = choose(described)
            args = {key: arg for key, arg in args.items() if key not in described.used}
            if template and is_keras:
                template = template.replace("jnp.astype(", "keras.ops.cast(")
                for module in ("jnp.linalg.", "jax.nn.", "jax.lax.", "jnp."):
                    template = template.replace(module, "keras.ops.")
            target = (
                _Target(template, parameters, arrays, frozenset(described.used))
                if template
                else None
            )
        else:
            assert isinstance(operation, Operation)
            template = operation.keras if is_keras else operation.jax
            if not template and self._roles.of(call) is Role.HOST:
                template = operation.jax
            if not template or (args := bind(call, operation.parameters)) is None:
                return None
            target = _Target(template, operation.parameters, operation.arrays)
        if target is None or not self._can_fill(target, args):
            return None
        if name == "tensorflow.constant" and _holds_text(call):
            return None
        return target

    def _can_fill(self, target: _Target, args: dict[str, cst.Arg]) -> bool:
        """Whether each argument has its place, and one that is read twice can be named."""
        names = _count(target.template)
        if any(name not in names for name in args):
            return False
        for name, times in names.items():
            if name not in args and target.parameters.get(name) is None:
                return False
            if times > 1 and name in args:
                value = args[name].value
                is_named = _is_simple(value) and not (
                    name in target.arrays and self._needs_array(value, target.template)
                )
                is_loop = " for " in target.template
                if not is_named and (is_loop or not self._can_name(value)):
                    return False
        return True

    def _can_name(self, value: cst.BaseExpression) -> bool:
        """Whether `name := value` may stand in place of a value."""
        return not any(isinstance(outer, cst.BaseComp) for outer in self._expression_around(value))

    def _expression_around(self, value: cst.CSTNode) -> list[cst.CSTNode]:
        found = []
        for outer in self.program.around(value):
            if isinstance(outer, cst.BaseSmallStatement | cst.BaseStatement):
                break
            found.append(outer)
        return found

    def _needs_array(self, value: cst.BaseExpression, template: str) -> bool:
        """Whether a value may be something that JAX does not take for an array."""
        if "_input.shape" in template:
            return False
        if template.startswith(("keras.", "jnp.asarray(", "jax.lax.map", "jax.vmap")):
            return False
        if self._kinds.is_number(value):
            return ".at[" in template
        if self._kinds.may_be_list(value):
            return not (isinstance(value, cst.Call) and self._is_ported_to_array(value))
        if self._roles.of(value) not in (Role.HOST, Role.BOTH):
            return False
        return not self._is_array(value)

    def _is_ported_to_array(self, value: cst.Call) -> bool:
        target = self._target(value)
        return target is not None and not target.template.startswith(("jnp.split", "list("))

    def _is_array(self, value: cst.BaseExpression, depth: int = 0) -> bool:
        """Whether a value in Python is an array of JAX or NumPy, or a number, for certain."""
        if depth > 9:
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
            func = value.func
            return isinstance(func, cst.Attribute) and func.attr.value in (
                "reduce",
                "gather",
                "result",
            )
        if isinstance(value, cst.Name):
            values = self.program.values(value)
            return bool(values) and all(self._is_array(x, depth + 1) for x in values or ())
        return False

    def _as_tuple(
        self, original: cst.BaseExpression, axis: cst.BaseExpression
    ) -> cst.BaseExpression:
        """Several axes as JAX takes them: in a tuple, where TensorFlow takes a list too."""
        if isinstance(axis, cst.List):
            elements = list(axis.elements)
            if len(elements) == 1:
                elements = [elements[0].with_changes(comma=cst.Comma())]
            return cst.Tuple(elements, lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        if isinstance(axis, cst.Call) and isinstance(axis.func, cst.Name):
            if axis.func.value in ("list", "range"):
                if axis.func.value == "list" and len(axis.args) == 1:
                    return axis.with_changes(func=cst.Name("tuple"))
                return cst.Call(cst.Name("tuple"), [cst.Arg(axis)])
        if self._kinds.may_be_list(original):
            return cst.Call(cst.Name("tuple"), [cst.Arg(axis)])
        return axis

    def _fill(
        self, template: str, values: dict[str, cst.BaseExpression], keywords: set[str]
    ) -> cst.BaseExpression:
        """An expression by its template."""
        twice = {
            name
            for name, times in _count(template).items()
            if times > 1 and name in values and not _is_simple(values[name])
        }
        taken = {x for value in values.values() for x in _names_in(value)}
        names: dict[str, str] = {}
        for name in sorted(twice):
            names[name] = self.program.free_name(_TWICE, taken)
            taken.add(names[name])
        names |= {x: self.program.free_name(x, taken) for x in _loop_names(template) & taken}
        for helper in HELPERS.keys() & _names_in(_parse(template)):
            names[helper] = self._helpers[helper] = self.program.free_name(helper)
            self.imports.add("jnp")
        filled = _parse(template).deep_clone().visit(_Fill(values, keywords, names, template))
        assert isinstance(filled, cst.BaseExpression)
        for module in ("jnp", "jax", "np", "keras", "optax"):
            if re.search(rf"\b{module}\.", template):
                self.imports.add(module)
        return filled

    def _call_around(self, node: cst.CSTNode) -> cst.Call | None:
        """The call that a node is an argument of, by itself."""
        arg = self.program.parent(node)
        call = self.program.parent(arg) if isinstance(arg, cst.Arg) else None
        return call if isinstance(call, cst.Call) else None

    def _is_annotation(self, node: cst.CSTNode) -> bool:
        return any(isinstance(x, cst.Annotation) for x in self._expression_around(node)) or any(
            isinstance(x, cst.Annotation) for x in self.program.around(node)
        )

    def _is_spec(self, call: cst.Call) -> bool:
        return self.program.callee(call) == "tensorflow.TensorSpec"

    def _is_of_tensorflow(self, node: cst.CSTNode) -> bool:
        """Whether a node is part of what a call of `tf.data` is given, or of a specification."""
        return any(
            isinstance(outer, cst.Call)
            and self.program.callee(outer).startswith(
                ("tensorflow.data.", "tensorflow.TensorSpec", "tensorflow.io.")
            )
            and not (self._is_spec(outer) and self._target(outer))
            for outer in self._expression_around(node)
        )


class _Fill(cst.CSTTransformer):
    """Puts arguments in the places of a template."""

    def __init__(
        self,
        values: dict[str, cst.BaseExpression],
        keywords: set[str],
        names: dict[str, str],
        template: str,
    ):
        super().__init__()
        self._values = values
        self._keywords = keywords
        self._names = names  # of values that are read twice, and for names of the template's own
        self._later: set[cst.CSTNode] = set()
        self._named: set[str] = set()
        self._by_position = template.startswith(_BY_POSITION)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Leaves out arguments that a call does not give, and names those that follow."""
        args: list[cst.Arg] = []
        is_left_out = False
        for i, (before, arg) in enumerate(zip(original_node.args, updated_node.args, strict=True)):
            name = _parameter(before.value)
            if name is not None and name not in self._values:
                is_left_out = True
                continue
            if name is not None and before.keyword is None and not self._by_position:
                is_same = name in _SAME and name in self._keywords and i > 0
                if is_left_out or is_same:
                    arg = arg.with_changes(keyword=cst.Name(name), equal=_NO_SPACE)
            elif before.keyword is not None:
                arg = arg.with_changes(equal=_NO_SPACE)
            args.append(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT))
        func = updated_node.func
        if isinstance(func, cst.Lambda) and not args and not func.params.params:
            return _in_parentheses(func.body)
        return updated_node.with_changes(args=args)

    def visit_IfExp(self, node: cst.IfExp) -> None:
        """Whether something is so is computed before what stands in front of it."""
        tested = _names_in(node.test)
        self._later |= {x for x in _all_names(node.body) if x.value in tested}

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        """One place."""
        name = _parameter(original_node)
        if name is None:
            return cst.Name(self._names.get(updated_node.value, updated_node.value))
        if name not in self._values:
            return updated_node
        if name in self._names:
            if name in self._named or original_node in self._later:
                return cst.Name(self._names[name])
            self._named.add(name)
            named = cst.NamedExpr(cst.Name(self._names[name]), self._values[name])
            return named.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return _in_parentheses(self._values[name].deep_clone())

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        """Puts an argument in its place without parentheses."""
        name = _parameter(original_node.value)
        if name is None or name not in self._values:
            return updated_node
        if name in self._names and isinstance(updated_node.value, cst.NamedExpr):
            if original_node.keyword is None:
                bare = updated_node.value.with_changes(lpar=[], rpar=[])
                return updated_node.with_changes(value=bare)
            return updated_node
        if isinstance(updated_node.value, cst.Name) and name in self._names:
            return updated_node
        return updated_node.with_changes(value=self._values[name].deep_clone())


@functools.cache
def _parse(template: str) -> cst.BaseExpression:
    return cst.parse_expression(template)


@functools.cache
def _count(template: str) -> dict[str, int]:
    """Returns how often a template reads each parameter."""
    found: dict[str, int] = {}
    for node in _all_names(_parse(template)):
        if (name := _parameter(node)) is not None:
            found[name] = found.get(name, 0) + 1
    return found


@functools.cache
def _loop_names(template: str) -> frozenset[str]:
    """The names that the comprehensions of a template bind."""
    found: set[str] = set()

    class Finder(cst.CSTVisitor):
        def visit_CompFor(self, node: cst.CompFor) -> None:
            found.update(_names_in(node.target))

    _parse(template).visit(Finder())
    return frozenset(found)


def _all_names(value: cst.CSTNode) -> list[cst.Name]:
    found: list[cst.Name] = []

    class Finder(cst.CSTVisitor):
        def visit_Name(self, node: cst.Name) -> None:
            found.append(node)

    value.visit(Finder())
    return found


def _names_in(value: cst.CSTNode) -> set[str]:
    return {node.value for node in _all_names(value)}


def _parameter(node: cst.BaseExpression) -> str | None:
    """The parameter that a node of a template stands for."""
    if isinstance(node, cst.Name) and node.value.startswith("_"):
        return node.value[1:]
    return None


def bind(call: cst.Call, parameters: dict[str, str | None]) -> dict[str, cst.Arg] | None:
    """The arguments of a call by the parameters they are for; None if that is not certain."""
    found: dict[str, cst.Arg] = {}
    names = list(parameters)
    for i, arg in enumerate(call.args):
        if arg.star or (arg.keyword is None and i >= len(names)):
            return None
        name = arg.keyword.value if arg.keyword else names[i]
        if arg.keyword and name in _DROPS:
            continue
        if name not in parameters or name in found:
            return None
        is_none = isinstance(arg.value, cst.Name) and arg.value.value == "None"
        if is_none and parameters[name] is not None:
            continue  # the default of all that may be left out
        found[name] = arg
    return found


def _is_simple(value: cst.BaseExpression) -> bool:
    """Whether a value may be read twice: a name, a number, or several of them."""
    if isinstance(value, cst.List | cst.Tuple):
        return all(_is_simple(element.value) for element in value.elements)
    if isinstance(value, cst.UnaryOperation):
        return _is_simple(value.expression)
    while isinstance(value, cst.Attribute):
        value = value.value
    return isinstance(value, cst.Name | cst.Integer | cst.Float)


def _in_parentheses(value: cst.BaseExpression) -> cst.BaseExpression:
    """A value that may stand between operators."""
    is_whole = (
        cst.Name
        | cst.Attribute
        | cst.Call
        | cst.Subscript
        | cst.Integer
        | cst.Float
        | cst.BaseString
        | cst.List
        | cst.Tuple
    )
    if isinstance(value, is_whole) or getattr(value, "lpar", ()):
        return value
    return value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _holds_text(call: cst.Call) -> bool:
    """Whether a constant is one of strings, which no device holds."""
    found: list[bool] = []

    class Finder(cst.CSTVisitor):
        def visit_SimpleString(self, node: cst.SimpleString) -> None:
            found.append(True)

    if call.args:
        call.args[0].value.visit(Finder())
    return bool(found)
