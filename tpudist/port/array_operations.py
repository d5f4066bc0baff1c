"""Operations on arrays: those that JAX, or Keras, has with the same meaning, where they change.

On replicas they are `jax.numpy`'s, in Keras objects `keras.ops`'. In Python around them they
change if what they are given is known to be no tensor of TensorFlow. `tf.reduce_mean` is left: of
integers it gives integers, and nothing else does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import libcst as cst

from tpudist.port.function_roles import Role, Roles
from tpudist.port.program import Program, Transformer
from tpudist.port.value_flow import ValueFlow


@dataclasses.dataclass(frozen=True)
class _Operation:
    """What an operation is called here.

    Attributes:
        jax: The function on replicas.
        keras: That of `keras.ops`; empty if there is none with this meaning.
        parameters: TensorFlow's names of the arguments that both have.
        by_position: How many of them may be given by position.
        required: How many must be given, because defaults differ.
    """

    jax: str
    keras: str
    parameters: tuple[str, ...]
    by_position: int
    required: int = 1


def _operations() -> dict[str, _Operation]:
    table: dict[str, _Operation] = {}

    def add(name: str, jax: str, keras: str, parameters: str, by_position: int, required: int = 1):
        operation = _Operation(jax, keras, tuple(parameters.split()), by_position, required)
        table[f"tensorflow.{name}"] = operation

    for name in "abs square sqrt exp tanh sin cos sign floor ceil log".split():
        add(f"math.{name}", f"jnp.{name}", name, "x", 1)
        if name not in ("ceil", "log"):
            add(name, f"jnp.{name}", name, "x", 1)
    add("math.rsqrt", "jax.lax.rsqrt", "rsqrt", "x", 1)
    for name, same in (("sum", "sum"), ("max", "max"), ("min", "min"), ("prod", "prod")):
        for module in ("", "math."):
            add(f"{module}reduce_{name}", f"jnp.{same}", same, "input_tensor axis keepdims", 2)
    for name in ("any", "all"):
        for module in ("", "math."):
            add(f"{module}reduce_{name}", f"jnp.{name}", name, "input_tensor axis keepdims", 2)
    for name in "maximum minimum add subtract multiply divide equal not_equal".split():
        for module in ("", "math."):
            add(f"{module}{name}", f"jnp.{name}", name, "x y", 2, 2)
    for name in "greater greater_equal less less_equal logical_and logical_or".split():
        for module in ("", "math."):
            add(f"{module}{name}", f"jnp.{name}", name, "x y", 2, 2)
    for module in ("", "math."):
        add(f"{module}logical_not", "jnp.logical_not", "logical_not", "x", 1)
        add(f"{module}pow", "jnp.power", "power", "x y", 2, 2)
    for name in ("matmul", "linalg.matmul"):
        add(name, "jnp.matmul", "matmul", "a b", 2, 2)
    add("cast", "jnp.astype", "cast", "x dtype", 2, 2)
    add("zeros", "jnp.zeros", "zeros", "shape dtype", 2)
    add("ones", "jnp.ones", "ones", "shape dtype", 2)
    add("zeros_like", "jnp.zeros_like", "zeros_like", "input dtype", 2)
    add("ones_like", "jnp.ones_like", "ones_like", "input dtype", 2)
    add("constant", "jnp.array", "convert_to_tensor", "value dtype", 2)
    add("convert_to_tensor", "jnp.asarray", "convert_to_tensor", "value dtype", 2)
    add("transpose", "jnp.transpose", "transpose", "a perm", 2)
    add("reshape", "jnp.reshape", "reshape", "tensor shape", 2, 2)
    add("concat", "jnp.concatenate", "concatenate", "values axis", 2, 2)
    add("stack", "jnp.stack", "stack", "values axis", 2)
    add("expand_dims", "jnp.expand_dims", "expand_dims", "input axis", 2, 2)
    add("squeeze", "jnp.squeeze", "squeeze", "input axis", 2)
    add("where", "jnp.where", "where", "condition x y", 3, 3)
    add("argmax", "jnp.argmax", "argmax", "input axis", 2, 2)
    add("argmin", "jnp.argmin", "argmin", "input axis", 2, 2)
    add("clip_by_value", "jnp.clip", "clip", "t clip_value_min clip_value_max", 3, 3)
    add("one_hot", "jax.nn.one_hot", "one_hot", "indices depth", 2, 2)
    add("stop_gradient", "jax.lax.stop_gradient", "stop_gradient", "input", 1)
    for name in "relu elu softplus".split():
        add(f"nn.{name}", f"jax.nn.{name}", name, "features", 1)
    for name in ("nn.sigmoid", "sigmoid", "math.sigmoid"):
        add(name, "jax.nn.sigmoid", "sigmoid", "x", 1)
    add("nn.tanh", "jnp.tanh", "tanh", "x", 1)
    for name in ("softmax", "log_softmax"):
        add(f"nn.{name}", f"jax.nn.{name}", name, "logits axis", 2)
    return table


OPERATIONS = _operations()
# How keywords are called here, where that is another word.
_KEYWORDS = {"perm": "axes"}
DTYPES = "bool bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32".split()
# What a strategy and its contexts have, of which none is a tensor in Python.
_NUMBERS = {"num_replicas_in_sync", "replica_id_in_sync_group"}
# Keywords that mean the same here, and stay keywords.
_SAME = {"axis", "dtype", "keepdims", "perm"}
# Functions of JAX whose arguments have no names.
_BY_POSITION = {"jnp.astype"}
# The name of an operation in a graph, and the dtype of numbers of elements, which is int32 here.
_DROPS = {"name", "output_type"}
_NO_SPACE = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


class ArrayOperations(Transformer):
    """Rewrites operations by where they run."""

    def __init__(self, program: Program):
        """Finds where functions run."""
        super().__init__(program)
        self._roles = Roles(program)
        self._flow = ValueFlow(program, self._roles, set(OPERATIONS))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """One operation."""
        if (target := self._target(original_node)) is None:
            return updated_node
        if target == "sum":
            return updated_node.with_changes(func=cst.Name("sum"))
        args = _match(updated_node.args, OPERATIONS[self.program.callee(original_node)])
        return updated_node.with_changes(func=self.write(target), args=args)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        """Dtypes of what changes, and of Keras objects; and `tf.newaxis`."""
        name = self.program.name(original_node)
        if not name.startswith("tensorflow."):
            return updated_node
        name = name.removeprefix("tensorflow.").removeprefix("dtypes.")
        role = self._roles.of(original_node)
        if name == "newaxis" and role in (Role.REPLICA, Role.KERAS):
            return cst.Name("None", lpar=updated_node.lpar, rpar=updated_node.rpar)
        call = self._call_around(original_node)
        if call is None or name not in (*DTYPES, "string") or role in (Role.DATASET, None):
            return updated_node
        called = self.program.callee(call)
        target = self._target(call) or ""
        if target.startswith("keras.") or called.startswith(("tensorflow.keras.", "keras.")):
            return cst.SimpleString(f'"{name}"')
        is_number = name in DTYPES
        return self.write(f"jnp.{name}", updated_node) if target and is_number else updated_node

    def leave_Subscript(
        self, original_node: cst.Subscript, updated_node: cst.Subscript
    ) -> cst.BaseExpression:
        """One number of a shape, which is known where code is Python or is compiled."""
        call, role = original_node.value, self._roles.of(original_node)
        if self.program.callee(call) != "tensorflow.shape" or not isinstance(call, cst.Call):
            return updated_node
        [index, *more] = original_node.slice
        is_number = isinstance(index.slice, cst.Index) and isinstance(
            index.slice.value, cst.Integer | cst.UnaryOperation
        )
        if more or not is_number or len(call.args) != 1 or call.args[0].keyword:
            return updated_node
        assert isinstance(updated_node.value, cst.Call)
        array = updated_node.value.args[0].value
        if role is Role.KERAS:
            shape = updated_node.value.with_changes(func=self.write("keras.ops.shape"))
            return updated_node.with_changes(value=shape)
        if role not in (Role.HOST, Role.REPLICA) or not isinstance(array, cst.Name | cst.Attribute):
            return updated_node
        return updated_node.with_changes(value=cst.Attribute(array, cst.Name("shape")))

    def _target(self, call: cst.Call) -> str | None:
        """What an operation becomes; None if it stays."""
        name = self.program.callee(call)
        role = self._roles.of(call)
        if name == "tensorflow.add_n" and role in (Role.REPLICA, Role.KERAS):
            is_one = len(call.args) == 1 and not call.args[0].star and not call.args[0].keyword
            return "sum" if is_one else None
        operation = OPERATIONS.get(name)
        if operation is None or _match(call.args, operation) is None:
            return None
        if name == "tensorflow.constant" and _holds_text(call):
            return None
        if role is Role.REPLICA or (
            role is Role.HOST
            and all(self._is_plain(arg.value) for arg in call.args)
            and self._flow.ends_well(call)
        ):
            return operation.jax
        return f"keras.ops.{operation.keras}" if role is Role.KERAS else None

    def _call_around(self, node: cst.CSTNode) -> cst.Call | None:
        """The call that a node is an argument of, by itself."""
        arg = self.program.parent(node)
        call = self.program.parent(arg) if isinstance(arg, cst.Arg) else None
        return call if isinstance(call, cst.Call) else None

    def _is_plain(self, value: cst.BaseExpression, depth: int = 0) -> bool:
        """Whether an expression of the host is no tensor of TensorFlow, for certain."""
        if depth > 20:  # names that are defined by each other
            return False
        if isinstance(value, cst.Integer | cst.Float | cst.SimpleString):
            return True
        if isinstance(value, cst.List | cst.Tuple):
            return all(
                isinstance(part, cst.Element) and self._is_plain(part.value, depth + 1)
                for part in value.elements
            )
        if isinstance(value, cst.UnaryOperation):
            return self._is_plain(value.expression, depth + 1)
        if isinstance(value, cst.BinaryOperation):
            return self._is_plain(value.left, depth + 1) and self._is_plain(value.right, depth + 1)
        if isinstance(value, cst.Subscript):  # a shape is one of numbers
            whole = value.value
            return self.program.callee(whole) == "tensorflow.shape" or (
                isinstance(whole, cst.Attribute) and whole.attr.value == "shape"
            )
        if isinstance(value, cst.Attribute):
            name = self.program.name(value).removeprefix("tensorflow.").removeprefix("dtypes.")
            return name in DTYPES or value.attr.value in _NUMBERS
        if isinstance(value, cst.Call):
            name = self.program.callee(value)
            if name.startswith("numpy."):
                return True
            if isinstance(value.func, cst.Name) and value.func.value in ("len", "int", "float"):
                return not self.program.assignments(value.func)
            if name in OPERATIONS:
                return all(self._is_plain(arg.value, depth + 1) for arg in value.args)
            return False
        if isinstance(value, cst.Name):
            return self._is_plain_name(value, depth)
        return False

    def _is_plain_name(self, name: cst.Name, depth: int) -> bool:
        """Whether all that a name is bound to is plain; what is added to it has to be, too."""
        found = self.program.assignments(name)
        for assignment in found:
            outer = self.program.parent(assignment.node)
            if isinstance(outer, cst.AssignTarget):
                outer = self.program.parent(outer)
            if not isinstance(outer, cst.Assign | cst.AugAssign) or outer.value is None:
                return False
            if isinstance(outer, cst.Assign) and len(outer.targets) != 1:
                return False
            if not self._is_plain(outer.value, depth + 1):
                return False
        return bool(found)


def _match(args: Sequence[cst.Arg], operation: _Operation) -> list[cst.Arg] | None:
    """The arguments of a call as they are given here; None if they do not mean the same."""
    found: list[cst.Arg] = []
    names: set[str] = set()
    parameters = operation.parameters
    for i, arg in enumerate(args):
        if arg.star:
            return None
        name = arg.keyword.value if arg.keyword else parameters[i] if i < len(parameters) else ""
        if arg.keyword and name in _DROPS:
            continue
        if name not in parameters:
            return None
        names.add(name)
        value = _as_tuple(arg.value) if name == "axis" else arg.value
        index = parameters.index(name)
        in_place = index == len(found) and not any(x.keyword for x in found)
        stays_named = arg.keyword and name in _SAME and operation.jax not in _BY_POSITION
        if index < operation.by_position and in_place and not stays_named:
            found.append(cst.Arg(value))
        else:
            keyword = cst.Name(_KEYWORDS.get(name, name))
            found.append(cst.Arg(value, keyword=keyword, equal=_NO_SPACE))
    if len(names & set(parameters[: operation.required])) < operation.required:
        return None
    # What is first has other names here, so it must be given by position.
    if not found or found[0].keyword is not None:
        return None
    return found


def _as_tuple(axis: cst.BaseExpression) -> cst.BaseExpression:
    """Several axes as JAX takes them: in a tuple, where TensorFlow takes a list too."""
    if not isinstance(axis, cst.List):
        return axis
    elements = list(axis.elements)
    if len(elements) == 1:
        comma = cst.Comma()
        elements = [elements[0].with_changes(comma=comma)]
    return cst.Tuple(elements, lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _holds_text(call: cst.Call) -> bool:
    """Whether a constant is one of strings, which no device holds."""
    found: list[bool] = []

    class Finder(cst.CSTVisitor):
        def visit_SimpleString(self, node: cst.SimpleString) -> None:
            found.append(True)

    if call.args:
        call.args[0].value.visit(Finder())
    return bool(found)
