"""Kinds of values: whether an expression is an array, a number or a list, and its dtype."""

from __future__ import annotations

import enum

import libcst as cst

from tpudist.port.analysis.nodes import function_name, keyword_name, values_of_returns
from tpudist.port.analysis.program import Program

_DEPTH = 12  # the longest chain of expressions that is followed, which also ends recursion
# Operations whose results are always floats.
_RETURN_FLOATS = set(
    "exp cos sin tan cosh sinh tanh sqrt rsqrt log log1p expm1 sigmoid log_sigmoid erf reciprocal "
    "divide truediv divide_no_nan reduce_std reduce_variance reduce_logsumexp softmax log_softmax "
    "softplus softsign gelu silu swish elu selu leaky_relu l2_normalize normal truncated_normal "
    "sparse_softmax_cross_entropy_with_logits softmax_cross_entropy_with_logits global_norm "
    "sigmoid_cross_entropy_with_logits compute_average_loss scale_regularization_loss "
    "reduce_euclidean_norm acos asin atan acosh asinh atanh linspace".split()
)
_RETURN_BOOLS = set(
    "equal not_equal greater greater_equal less less_equal logical_and logical_or logical_not "
    "logical_xor reduce_any reduce_all is_nan is_inf is_finite".split()
)
_RETURN_INTEGERS = {"argmax", "argmin", "argsort", "size", "rank", "count_nonzero", "shape"}
# Operations whose results have the kind of their first argument.
_KEEP_FIRST_KIND = set(
    "abs sign square floor ceil round negative identity stop_gradient reduce_sum reduce_max "
    "reduce_min reduce_prod reduce_mean cumsum cumprod transpose reshape broadcast_to expand_dims "
    "squeeze tile repeat reverse roll gather gather_nd relu relu6 clip_by_value sort add_n stack "
    "concat split unstack zeros_like ones_like pad boolean_mask slice constant "
    "convert_to_tensor".split()
)
# Operations whose operands and result have one kind.
_KEEP_KIND = set("maximum minimum add subtract multiply pow squared_difference matmul".split())
# Positions of the parameter dtype, from 0.
_DTYPE_PLACES = {
    "constant": 1,
    "convert_to_tensor": 1,
    "eye": 3,
    "one_hot": 5,
    "ones": 1,
    "ones_like": 1,
    "uniform": 3,
    "zeros": 1,
    "zeros_like": 1,
}
# Operations that return floats without a dtype.
_MAKE_FLOATS = {"eye", "one_hot", "ones", "uniform", "zeros"}
# Keywords that determine the dtype.
_GIVE_DTYPES = {"dtype", "on_value", "off_value"}
_FLOAT_NAMES = ("float", "bfloat", "half", "double")
_NUMBER_TYPES = {"float", "int", "len", "bool"}
_LOSSES = ("tensorflow.keras.losses.", "keras.losses.")


class Numbers(enum.Enum):
    """The kind of numbers in an array."""

    FLOATS = "floats"
    INTEGERS = "integers or booleans"
    UNKNOWN = "unknown"
    ANY = "nothing yet: a name that is being examined, which does not restrict a join"


class ValueKinds:
    """Determines the kinds of expressions of a program."""

    def __init__(self, program: Program):
        self._program = program
        self._numbers: dict[tuple[object, str], Numbers] = {}
        self._active: set[tuple[object, str]] = set()  # names that are being examined

    def numbers(self, value: cst.BaseExpression, depth: int = 0) -> Numbers:
        """Returns the kind of numbers of an array, of a number, or of a list of them."""
        if depth > _DEPTH:
            return Numbers.UNKNOWN
        if isinstance(value, cst.Float):
            return Numbers.FLOATS
        if isinstance(value, cst.Integer | cst.Comparison):
            return Numbers.INTEGERS
        if isinstance(value, cst.UnaryOperation):
            is_not = isinstance(value.operator, cst.Not)
            return Numbers.INTEGERS if is_not else self.numbers(value.expression, depth + 1)
        if isinstance(value, cst.BinaryOperation):
            is_division = isinstance(value.operator, cst.Divide)
            operands = [value.left, value.right]
            return Numbers.FLOATS if is_division else self._of_operands(operands, depth)
        if isinstance(value, cst.Subscript):
            return self.numbers(value.value, depth + 1)
        if isinstance(value, cst.List | cst.Tuple):
            return self._of_all([x.value for x in value.elements], depth)
        if isinstance(value, cst.ListComp | cst.GeneratorExp):
            return self.numbers(value.elt, depth + 1)
        if isinstance(value, cst.IfExp):
            return self._of_all([value.body, value.orelse], depth)
        if isinstance(value, cst.Name):
            return self._of_name(value, depth)
        if isinstance(value, cst.Call):
            return self._of_call(value, depth)
        return Numbers.UNKNOWN

    def may_be_list(self, value: cst.BaseExpression) -> bool:
        """Returns whether an expression is a list or tuple, or a name that may be bound to one."""
        # Names may be bound to each other in a circle, so each is followed once.
        left, followed = [value], set()
        while left:
            match left.pop():
                case cst.List() | cst.Tuple() | cst.ListComp():
                    return True
                # `model.losses` of Keras, `PerReplica.values`, and the shape of an array.
                case cst.Attribute(attr=cst.Name("losses" | "values" | "shape")):
                    return True
                case cst.Call() as call:
                    name = self._program.callee(call) or function_name(call)
                    if name in ("tensorflow.split", "tensorflow.unstack", "list", "tuple"):
                        return True
                case cst.BinaryOperation(left=first, right=second):
                    left += [first, second]
                case cst.IfExp(body=first, orelse=second):
                    left += [first, second]
                case cst.Subscript(value=whole, slice=[cst.SubscriptElement(slice=cst.Slice())]):
                    left.append(whole)
                case cst.Name() as name:
                    key = (self._program.scope(name), name.value)
                    if key not in followed:
                        followed.add(key)
                        left += self._values(name)
        return False

    def _values(self, name: cst.Name) -> list[cst.BaseExpression]:
        """Returns all expressions that a name is bound to, or that are added to it."""
        values = (self._bound_value(x.node) for x in self._program.assignments(name))
        return [value for value in values if value is not None]

    def _bound_value(self, node: cst.CSTNode) -> cst.BaseExpression | None:
        """Returns the expression of an assignment to a name; None for another binding."""
        target = self._program.parent(node)
        if isinstance(target, cst.AssignTarget):
            statement = self._program.parent(target)
            return statement.value if isinstance(statement, cst.Assign) else None
        is_value = isinstance(target, cst.AnnAssign | cst.NamedExpr | cst.AugAssign)
        return target.value if is_value else None

    def is_number(self, value: cst.BaseExpression, depth: int = 0) -> bool:
        """Returns whether an expression is certainly a number of Python."""
        if isinstance(value, cst.Integer | cst.Float):
            return True
        if isinstance(value, cst.UnaryOperation):
            return self.is_number(value.expression, depth)
        if isinstance(value, cst.BinaryOperation):
            return self.is_number(value.left, depth) and self.is_number(value.right, depth)
        if isinstance(value, cst.Subscript):
            of_shape = isinstance(value.value, cst.Attribute) and value.value.attr.value == "shape"
            of_shape = of_shape or self._program.callee(value.value) == "tensorflow.shape"
            return of_shape and isinstance(value.slice[0].slice, cst.Index)
        if isinstance(value, cst.Attribute):
            return value.attr.value == "num_replicas_in_sync"
        if isinstance(value, cst.Call):
            return self._is_python_number(value)
        if isinstance(value, cst.Name) and depth < _DEPTH:
            values = self._values(value)
            is_all = len(values) == len(self._program.assignments(value))
            return bool(values) and is_all and all(self.is_number(x, depth + 1) for x in values)
        return False

    def _is_python_number(self, call: cst.Call) -> bool:
        """Returns whether a call is one of `float`, `int`, `len` and `bool` of Python."""
        is_redefined = isinstance(call.func, cst.Name) and self._program.assignments(call.func)
        return not is_redefined and function_name(call) in _NUMBER_TYPES

    def _of_all(self, values: list[cst.BaseExpression], depth: int) -> Numbers:
        """Returns the kind of several values, if it is the same."""
        return _join({self.numbers(value, depth + 1) for value in values})

    def _of_operands(self, values: list[cst.BaseExpression], depth: int) -> Numbers:
        """Returns the kind of an operation; TensorFlow requires operands of one dtype."""
        found = {self.numbers(value, depth + 1) for value in values}
        # A Python integer takes the dtype of the array, so `0 * x` has the kind of `x`.
        return Numbers.FLOATS if Numbers.FLOATS in found else _join(found)

    def _of_name(self, name: cst.Name, depth: int) -> Numbers:
        """Returns the kind of all values of a name."""
        key = (self._program.scope(name), name.value)
        if key in self._active:  # a value contains the name itself, and so adds no information
            return Numbers.ANY
        if key in self._numbers:
            return self._numbers[key]
        self._active.add(key)
        found = self._of_bindings(name, depth)
        self._active.remove(key)
        # Only the result of the outermost name is complete: an inner one may lack the values of a
        # name that is being examined.
        if not self._active:
            self._numbers[key] = found
        return found

    def _of_bindings(self, name: cst.Name, depth: int) -> Numbers:
        values: list[cst.BaseExpression] = []
        for assignment in self._program.assignments(name):
            target = self._program.parent(assignment.node)
            if isinstance(target, cst.For | cst.CompFor) and target.target is assignment.node:
                # The elements of an array, or of a list of arrays, have the kind of the whole.
                values.append(target.iter)
                continue
            value = self._bound_value(assignment.node)
            is_division = isinstance(target, cst.AugAssign) and isinstance(
                target.operator, cst.DivideAssign
            )
            if value is None or is_division or isinstance(target, cst.AnnAssign):
                return Numbers.UNKNOWN
            values.append(value)
        if not values:
            return Numbers.UNKNOWN
        kinds = {
            self.numbers(value, depth + 1)
            for value in values
            # An empty list, to which the program appends, says nothing about its elements.
            if not (isinstance(value, cst.List) and not value.elements)
        }
        return _join(kinds)

    def _of_call(self, call: cst.Call, depth: int) -> Numbers:
        name = self._program.callee(call)
        last = name.rpartition(".")[2]
        if name.startswith(_LOSSES) and last[:1].islower():
            return Numbers.FLOATS
        if last in ("cast", "astype") and name.startswith(("tensorflow.", "jax.", "keras.ops.")):
            return self._of_dtype(call)
        if name.startswith("tensorflow."):
            return self._of_operation(last, call, depth)
        if not name and self._is_python_number(call):
            return Numbers.FLOATS if function_name(call) == "float" else Numbers.INTEGERS
        if isinstance(call.func, cst.Call):  # a loss or a layer of Keras
            return self._of_losses([call.func])
        function = self._program.function(call.func)
        if isinstance(function, cst.FunctionDef):
            returned = values_of_returns(function)
            values = [x for x in returned if x is not None]
            is_certain = bool(values) and len(values) == len(returned)
            return self._of_all(values, depth) if is_certain else Numbers.UNKNOWN
        return self._of_losses(self._program.values(call.func))

    def _of_losses(self, values: list[cst.BaseExpression] | list[cst.Call]) -> Numbers:
        """Returns the kind of the results of objects: floats if all objects are Keras losses."""
        are_losses = bool(values) and all(
            self._program.callee(x).startswith(_LOSSES) for x in values
        )
        return Numbers.FLOATS if are_losses else Numbers.UNKNOWN

    def _of_operation(self, last: str, call: cst.Call, depth: int) -> Numbers:
        """Returns the kind of an operation of TensorFlow, by its last name."""
        if last in _RETURN_FLOATS:
            return Numbers.FLOATS
        if last in _RETURN_BOOLS or last in _RETURN_INTEGERS:
            return Numbers.INTEGERS
        if last in _DTYPE_PLACES:
            keywords = {x.keyword.value for x in call.args if x.keyword}
            # The first position whose argument determines the dtype: for `one_hot`, it is
            # `on_value`.
            first = 2 if last == "one_hot" else _DTYPE_PLACES[last]
            if keywords & _GIVE_DTYPES or len(call.args) - len(keywords) > first:
                return self._of_dtype(call, _DTYPE_PLACES[last])
            if last in _MAKE_FLOATS:
                return Numbers.FLOATS
        if last == "where" and len(call.args) == 3:
            return self._of_all([x.value for x in call.args[1:]], depth)
        if last == "einsum" and len(call.args) > 1:
            return self.numbers(call.args[1].value, depth + 1)
        if last in _KEEP_KIND:
            return self._of_operands([x.value for x in call.args[:2]], depth)
        if last in _KEEP_FIRST_KIND and call.args:
            return self.numbers(call.args[0].value, depth + 1)
        return Numbers.UNKNOWN

    def _of_dtype(self, call: cst.Call, place: int = 1) -> Numbers:
        """Returns the kind of a call's dtype, by keyword or at a position, from 0."""
        found = [x.value for x in call.args if keyword_name(x) == "dtype"]
        found = found or [x.value for x in call.args[place : place + 1] if not x.keyword]
        return self.of_dtype(found[0]) if found else Numbers.UNKNOWN

    def of_dtype(self, dtype: cst.BaseExpression) -> Numbers:
        """Returns the kind of a dtype of NumPy or TensorFlow, or of its name."""
        name = self._program.name(dtype).rpartition(".")[2]
        if isinstance(dtype, cst.SimpleString):
            name = str(dtype.evaluated_value)
        if not name:
            return Numbers.UNKNOWN
        if name.startswith(_FLOAT_NAMES):
            return Numbers.FLOATS
        is_integer = name.startswith(("int", "uint", "bool"))
        return Numbers.INTEGERS if is_integer else Numbers.UNKNOWN


def _join(kinds: set[Numbers]) -> Numbers:
    """Returns the kind of several values, if it is the same."""
    # The neutral element: `total = total + loss` has the kind of `loss`. A name that is bound only
    # to itself stays unknown.
    kinds.discard(Numbers.ANY)
    return kinds.pop() if len(kinds) == 1 else Numbers.UNKNOWN
