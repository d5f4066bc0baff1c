"""Operations whose replacement depends on their arguments: each chooses a template for one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import libcst as cst

from tpudist.port.analysis.function_roles import Role
from tpudist.port.analysis.nodes import code_of, has_text
from tpudist.port.analysis.program import Program
from tpudist.port.analysis.value_kinds import Numbers, ValueKinds
from tpudist.port.operations.shape_values import are_parts_of_shape, is_shape, is_taken_as_shape
from tpudist.port.operations.signatures import is_signature


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an operation, for the choice of its template.

    Attributes:
        program: The program.
        kinds: The kinds of its values.
        role: Role of the code around the call.
        node: The call.
        args: Arguments by parameter.
        handled: Parameters whose arguments need no place in the template.
    """

    program: Program
    kinds: ValueKinds
    role: Role | None
    node: cst.Call
    args: dict[str, cst.BaseExpression]
    handled: set[str] = dataclasses.field(default_factory=set)

    def mark_handled(self, *names: str) -> None:
        """Records arguments that need no place: the template has their meaning, if any."""
        self.handled.update(names)

    @property
    def is_on_host(self) -> bool:
        """Whether the call runs in Python, where shapes may depend on data."""
        return self.role is Role.HOST


_BOOL_LITERALS = {"True": True, "False": False}


def _mean(call: Call) -> str:
    of, dtype = "_input_tensor, _axis, keepdims=_keepdims", "_input_tensor.dtype"
    if call.kinds.is_number(call.args["input_tensor"]):
        return ""  # a Python number has no dtype
    # In TensorFlow the mean of integers is an integer, rounded toward zero.
    numbers = call.kinds.numbers(call.args["input_tensor"])
    if numbers is Numbers.FLOATS:
        return f"jnp.mean({of})"
    if call.role is Role.KERAS:
        return f"keras.ops.cast(keras.ops.mean({of}), {dtype})"
    if numbers is Numbers.INTEGERS:
        return f"jnp.mean({of}, dtype={dtype})"
    # Only integers get a dtype: with the dtype float16, JAX would also add in float16.
    return f"jnp.mean({of}, dtype={dtype} if jnp.issubdtype({dtype}, jnp.integer) else None)"


def _prod(call: Call) -> str:
    # The product of the sizes of a shape is a Python number, like the sizes.
    if len(call.args) == 1 and is_shape(call.program, call.args["input_tensor"]):
        return "np.prod(_input_tensor, dtype=int)"
    return "jnp.prod(_input_tensor, _axis, keepdims=_keepdims)"


def _matmul(call: Call) -> str:
    names = []
    for name in ("a", "b"):
        transposed = call.args.get(f"transpose_{name}")
        text = code_of(transposed) if transposed is not None else "False"
        if text not in _BOOL_LITERALS:
            return ""
        names.append(f"jnp.swapaxes(_{name}, -1, -2)" if _BOOL_LITERALS[text] else f"_{name}")
        call.mark_handled(f"transpose_{name}")
    return f"jnp.matmul({', '.join(names)})"


def _split(call: Call) -> str:
    # TensorFlow takes the sizes of the parts; JAX takes the places where parts end.
    sizes = call.args["num_or_size_splits"]
    if call.kinds.is_number(sizes):
        return "jnp.split(_value, _num_or_size_splits, _axis)"
    is_literal = isinstance(sizes, cst.List | cst.Tuple)
    numbers = [code_of(x.value) for x in sizes.elements] if is_literal else [""]
    if all(x.isdigit() for x in numbers):
        call.mark_handled("num_or_size_splits")
        ends = [sum(map(int, numbers[: i + 1])) for i in range(len(numbers) - 1)]
        return f"jnp.split(_value, {ends}, _axis)"
    # A size may be -1, also in a name. Only the array tells the size of that part.
    axis = "_axis" if "axis" in call.args else "0"
    return f"jnp.split(_value, part_ends(_num_or_size_splits, _value.shape[{axis}]), _axis)"


def _concat(call: Call) -> str:
    # Parts of shapes make a shape, which stays a sequence of Python numbers. It has one axis.
    if are_parts_of_shape(call.program, call.args["values"]):
        call.mark_handled("axis")
        return "[size for part in _values for size in part]"
    return "jnp.concatenate(_values, _axis)"


def _stack(call: Call) -> str:
    # Numbers that make a shape stay Python numbers.
    values = call.args["values"]
    is_list = isinstance(values, cst.List) and "axis" not in call.args
    if is_list and is_taken_as_shape(call.program, call.node):
        return "_values"
    return "jnp.stack(_values, _axis)"


def _unstack(call: Call) -> str:
    # `num` repeats the size of the dim, which JAX reads from the array.
    call.mark_handled("num")
    return "list(jnp.unstack(_value, axis=_axis))"


def _pad(call: Call) -> str:
    mode = call.args.get("mode")
    if mode is not None and not isinstance(mode, cst.SimpleString):
        return ""
    name = "constant" if mode is None else str(mode.evaluated_value).lower()
    call.mark_handled("mode")
    if name == "constant":
        return "jnp.pad(_tensor, _paddings, constant_values=_constant_values)"
    if name in ("reflect", "symmetric"):
        return f'jnp.pad(_tensor, _paddings, mode="{name}")'
    return ""


def _range(call: Call) -> str:
    # A single positional argument is the end, also if a step is given.
    names = [name for name in ("start", "limit", "delta") if name in call.args]
    if names == ["start", "delta"]:
        return "jnp.arange(0, _start, _delta, dtype=_dtype)"
    return f"jnp.arange({', '.join(f'_{name}' for name in names)}, dtype=_dtype)"


def _norm(call: Call) -> str:
    if "ord" in call.args and not has_text(call.args["ord"], "euclidean"):
        return ""
    call.mark_handled("ord")
    return "jnp.linalg.norm(_tensor, axis=_axis, keepdims=_keepdims)"


def _boolean_mask(call: Call) -> str:
    # Only Python may compute a number of rows from data.
    return "_tensor[np.asarray(_mask)]" if call.is_on_host else ""


def _where(call: Call) -> str:
    if len(call.args) == 3:
        return "jnp.where(_condition, _x, _y)"
    return "jnp.argwhere(_condition)" if call.is_on_host and len(call.args) == 1 else ""


def _band_part(call: Call) -> str:
    call.mark_handled("num_lower", "num_upper")
    bands = (code_of(call.args["num_lower"]), code_of(call.args["num_upper"]))
    return {("-1", "0"): "jnp.tril(_input)", ("0", "-1"): "jnp.triu(_input)"}.get(bands, "")


def _sequence_mask(call: Call) -> str:
    # The default of maxlen is the longest length, so the shape would depend on data.
    if "maxlen" not in call.args:
        return ""
    mask = "jnp.arange(_maxlen) < jnp.expand_dims(_lengths, -1)"
    return f"jnp.astype({mask}, _dtype)" if "dtype" in call.args else mask


def _top_k(call: Call) -> str:
    outer = call.program.parent(call.node)
    # JAX always sorts, which also satisfies sorted=False.
    call.mark_handled("sorted")
    if "k" not in call.args:
        return ""
    # TensorFlow returns a named tuple, with `.values` and `.indices`; JAX returns a pair.
    is_unpacked = isinstance(outer, cst.Assign) and isinstance(
        outer.targets[0].target, cst.Tuple | cst.List
    )
    return "jax.lax.top_k(_input, _k)" if is_unpacked or isinstance(outer, cst.Subscript) else ""


def _shape(call: Call) -> str:
    # A list has no attribute `shape`, and of a symbolic tensor only `keras.ops.shape` tells a size
    # that is not known yet.
    array = call.args["input"]
    is_array = isinstance(array, cst.Name | cst.Attribute) and not call.kinds.may_be_list(array)
    shape = "_input.shape" if is_array and call.role is not Role.KERAS else "jnp.shape(_input)"
    # A tuple of numbers if all readers accept one, else an array.
    return shape if is_taken_as_shape(call.program, call.node) else f"jnp.array({shape})"


def _cond(call: Call) -> str:
    if not {"pred", "true_fn", "false_fn"} <= set(call.args):
        return ""
    if call.is_on_host:
        return "_true_fn() if _pred else _false_fn()"
    return "jax.lax.cond(_pred, _true_fn, _false_fn)"


def _one_hot(call: Call) -> str:
    # `jax.nn.one_hot` writes only ones and zeros. Without a dtype, `on_value` and `off_value`
    # determine it.
    dtype = "_dtype"
    for name, value in (("on_value", 1), ("off_value", 0)):
        if name in call.args:
            text = code_of(call.args[name])
            if text not in (f"{value}", f"{value}.0", f"{value}."):
                return ""
            if text == f"{value}" and "dtype" not in call.args:
                dtype = '"int32"'
            call.mark_handled(name)
    return f"jax.nn.one_hot(_indices, _depth, axis=_axis, dtype={dtype})"


def _uniform(call: Call) -> str:
    # For integers, Keras has another function, and TensorFlow no default for `maxval`.
    dtype = call.args.get("dtype")
    numbers = call.kinds.of_dtype(dtype) if dtype is not None else Numbers.FLOATS
    if numbers is Numbers.FLOATS:
        return "keras.random.uniform(_shape, _minval, _maxval, _dtype)"
    if numbers is Numbers.UNKNOWN or "maxval" not in call.args:
        return ""
    least = "_minval" if "minval" in call.args else "0"
    return f"keras.random.randint(_shape, {least}, _maxval, _dtype)"


def _add_n(call: Call) -> str:
    is_array = call.role in (Role.REPLICA, Role.KERAS)
    return "sum(_inputs)" if is_array else "sum(map(jnp.asarray, _inputs))"


def _count_nonzero(call: Call) -> str:
    # `keras.ops.count_nonzero` has no keepdims. Without a place for it, a call that has it stays.
    keepdims = "" if call.role is Role.KERAS else ", keepdims=_keepdims"
    count = f"jnp.count_nonzero(_input, _axis{keepdims})"
    return f"jnp.astype({count}, _dtype)" if "dtype" in call.args else count


def _name_scope(call: Call) -> str:
    # In Python the scope may give names to records of `tf.summary`, which stays.
    if call.role is Role.KERAS:
        return "keras.name_scope(_name)"
    names_summaries = call.is_on_host and call.program.uses("tensorflow.summary.")
    return "" if names_summaries else "jax.named_scope(_name)"


def _profiler_trace(call: Call) -> str:
    call.mark_handled("_r")  # `_r=1` marks a step for TensorFlow's profiler; here `step_num` does
    if "step_num" in call.args:
        return "jax.profiler.StepTraceAnnotation(_name, step_num=_step_num)"
    return "jax.profiler.TraceAnnotation(_name)"


def _tensor_spec(call: Call) -> str:
    # Specifications for a pipeline or a graph stay.
    call.mark_handled("name")
    code = code_of(call.node)
    if "None" in code or "string" in code or not {"shape", "dtype"} <= set(call.args):
        return ""
    return "" if is_signature(call.program, call.node) else "jax.ShapeDtypeStruct(_shape, _dtype)"


def _parameters(text: str) -> dict[str, str | None]:
    """Returns the parameters of "a b=" for `bind`: None if required, "" if optional."""
    found: dict[str, str | None] = {}
    for parameter in text.split():
        name, has_default, _ = parameter.partition("=")
        found[name] = "" if has_default else None
    return found


# Functions with any number of arguments, and the functions with the same arguments here.
SAME_ARGUMENTS = {
    "tensorflow.einsum": "jnp.einsum",
    "tensorflow.linalg.einsum": "jnp.einsum",
    "tensorflow.meshgrid": "jnp.meshgrid",
    "tensorflow.nest.map_structure": "keras.tree.map_structure",
    "tensorflow.nest.assert_same_structure": "keras.tree.assert_same_structure",
}


@dataclasses.dataclass(frozen=True)
class Irregular:
    """An operation whose template depends on the call.

    Attributes:
        parameters: Parameters for `templates.bind`.
        arrays: Parameters that must be arrays.
        choose: Returns the template for a call; "" if the call stays.
    """

    parameters: dict[str, str | None]
    arrays: frozenset[str]
    choose: Callable[[Call], str]


IRREGULAR: dict[str, Irregular] = {}  # by name
for _names, _text, _arrays, _choose in (
    ("reduce_mean math.reduce_mean", "input_tensor axis= keepdims=", "input_tensor", _mean),
    ("reduce_prod math.reduce_prod", "input_tensor axis= keepdims=", "input_tensor", _prod),
    ("random.uniform", "shape minval= maxval= dtype=", "", _uniform),
    ("matmul linalg.matmul", "a b transpose_a= transpose_b=", "a b", _matmul),
    ("split", "value num_or_size_splits axis=", "value", _split),
    ("concat", "values axis", "", _concat),
    ("stack", "values axis=", "", _stack),
    ("one_hot", "indices depth on_value= off_value= axis= dtype=", "indices", _one_hot),
    ("unstack", "value num= axis=", "value", _unstack),
    ("pad", "tensor paddings mode= constant_values=", "tensor", _pad),
    ("range", "start limit= delta= dtype=", "", _range),
    ("norm linalg.norm", "tensor ord= axis= keepdims=", "tensor", _norm),
    ("boolean_mask", "tensor mask", "tensor", _boolean_mask),
    ("where", "condition x= y=", "condition x y", _where),
    ("linalg.band_part", "input num_lower num_upper", "input", _band_part),
    ("sequence_mask", "lengths maxlen= dtype=", "lengths", _sequence_mask),
    ("math.top_k nn.top_k", "input k= sorted=", "input", _top_k),
    ("shape", "input", "input", _shape),
    ("cond", "pred true_fn= false_fn=", "", _cond),
    ("add_n math.add_n", "inputs", "", _add_n),
    ("math.count_nonzero", "input axis= keepdims= dtype=", "input", _count_nonzero),
    ("name_scope", "name", "", _name_scope),
    ("profiler.experimental.Trace", "name step_num= _r=", "", _profiler_trace),
    ("TensorSpec", "shape= dtype= name=", "", _tensor_spec),
):
    for _name in _names.split():
        _operation = Irregular(_parameters(_text), frozenset(_arrays.split()), _choose)
        IRREGULAR[f"tensorflow.{_name}"] = _operation
