"""Operations of TensorFlow that JAX and Keras have with the same meaning, as templates.

In a template, `_x` stands for the argument `x`. An argument that a call does not have is left out.
`tests/port/test_array_operations.py` compares each operation with NumPy, and with TensorFlow.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of TensorFlow and the expressions that replace a call of it.

    Attributes:
        parameters: TensorFlow's parameters in order, with their defaults: None for a required one,
            an empty string if the defaults are equal, else TensorFlow's default, to be written.
        jax: Template on replicas and in Python; empty if there is none.
        keras: Template in Keras objects; empty if there is none.
        arrays: Parameters that must be arrays here; TensorFlow also accepts lists of numbers.
    """

    parameters: dict[str, str | None]
    jax: str
    keras: str
    arrays: frozenset[str] = frozenset()


OPERATIONS: dict[str, Operation] = {}

# Names of parameters that are never arrays. `-` before a parameter says that of one operation.
_NOT_ARRAYS = set(
    "axis axes keepdims dtype shape dims perm depth multiples repeats num num_rows num_columns "
    "shift num_segments approximate epsilon t_list fn stddev mean minval maxval num_samples "
    "structure flat_sequence true_fn false_fn pred clip_norm side f tensors".split()
)


def _add(names: str, parameters: str, jax: str, keras: str = "=") -> None:
    """Adds operations with the same parameters and templates.

    Args:
        names: Names without `tf.`. `+` before a name adds it in `tf` and in `tf.math`.
        parameters: Parameters; `x=` has a default, `x==0` the default 0 that differs here, and `-x`
            is never an array. One without a place in the template is listed so that a call that has
            it stays.
        jax: Template; `{}` is the last part of the name.
        keras: Template for Keras; `=` is the template of `jax` with `keras.ops` instead of `jnp`.
    """
    table: dict[str, str | None] = {}
    arrays: set[str] = set()
    for parameter in parameters.split():
        name, has_default, default = parameter.removeprefix("-").partition("=")
        table[name] = default.removeprefix("=") if has_default else None
        if name not in _NOT_ARRAYS and parameter[0] != "-" and not has_default:
            arrays.add(name)
    for name in names.split():
        # `+abs` is tf.abs and tf.math.abs.
        places = (name[1:], f"math.{name[1:]}") if name[0] == "+" else (name,)
        for place in places:
            of_jax = jax.replace("{}", place.rpartition(".")[2].removeprefix("reduce_"))
            of_keras = for_keras(of_jax if keras == "=" else keras)
            operation = Operation(table, of_jax, of_keras, frozenset(arrays))
            OPERATIONS[f"tensorflow.{place}"] = operation


def for_keras(template: str) -> str:
    """Returns a template with `keras.ops` instead of the modules of JAX."""
    for module in ("jax.scipy.special.", "jnp.linalg.", "jax.nn.", "jax.lax.", "jnp."):
        template = template.replace(module, "keras.ops.")
    return template


# Operations on one array.
_add("+abs +exp +cos +sin +tan +cosh +sinh +tanh +sign +sqrt +square", "x", "jnp.{}(_x)")
_add("+floor +round math.ceil math.log math.log1p math.expm1 +negative", "x", "jnp.{}(_x)")
for _name in "acos acosh asin asinh atan atanh".split():
    _add(f"+{_name}", "x", f"jnp.arc{_name[1:]}(_x)")
for _name in "nan inf finite".split():
    _add(f"math.is_{_name}", "x", f"jnp.is{_name}(_x)")
_add("math.reciprocal", "x", "jnp.reciprocal(_x)")
_add("math.rint", "x", "jnp.rint(_x)", "")
_add("math.rsqrt", "x", "jax.lax.rsqrt(_x)")
_add("math.erf math.erfinv", "x", "jax.scipy.special.{}(_x)")
_add("math.lgamma", "x", "jax.scipy.special.gammaln(_x)", "")
_add("math.digamma", "x", "jax.scipy.special.digamma(_x)", "")
_add("math.log_sigmoid", "x", "jax.nn.log_sigmoid(_x)")
_add("+sigmoid nn.sigmoid", "x", "jax.nn.sigmoid(_x)")
_add("+logical_not", "x", "jnp.logical_not(_x)")
_add("math.real math.imag math.conj math.angle", "input", "jnp.{}(_input)")
_add("cast dtypes.cast", "x dtype", "jnp.astype(_x, _dtype)", "keras.ops.cast(_x, _dtype)")
_add("identity", "input", "jnp.asarray(_input)", "keras.ops.convert_to_tensor(_input)")
_add("stop_gradient", "input", "jax.lax.stop_gradient(_input)")
_add("size", "input", "jnp.size(_input)")
_add("rank", "input", "jnp.ndim(_input)")

# Operations on two arrays.
_add("+maximum +minimum +add +subtract +multiply +equal +not_equal", "x y", "jnp.{}(_x, _y)")
_add("+greater +greater_equal +less +less_equal", "x y", "jnp.{}(_x, _y)")
_add("+logical_and +logical_or math.logical_xor", "x y", "jnp.{}(_x, _y)")
_add("+divide +truediv", "x y", "jnp.divide(_x, _y)")
_add("+pow", "x y", "jnp.power(_x, _y)")
_add("math.floordiv", "x y", "jnp.floor_divide(_x, _y)")
_add("math.mod math.floormod", "x y", "jnp.mod(_x, _y)")
_add("math.atan2", "y x", "jnp.arctan2(_y, _x)")
_add("bitwise.bitwise_and bitwise.bitwise_or bitwise.bitwise_xor", "x y", "jnp.{}(_x, _y)")
_add("bitwise.left_shift bitwise.right_shift", "x y", "jnp.{}(_x, _y)")
_add("bitwise.invert", "x", "jnp.invert(_x)", "")
_add("math.squared_difference", "x y", "jnp.square(_x - _y)")
_add("math.divide_no_nan", "x y", "jnp.where(_y == 0, 0, _x / jnp.where(_y == 0, 1, _y))")
_add("math.multiply_no_nan", "x y", "jnp.where(_y == 0, 0, _x * _y)")
_add("math.xlogy", "x y", "jax.scipy.special.xlogy(_x, _y)", "")

# Reductions along axes.
for _names, _call in (
    ("+reduce_sum +reduce_max +reduce_min +reduce_any +reduce_all", "jnp.{}"),
    ("math.reduce_std", "jnp.std"),
    ("math.reduce_variance", "jnp.var"),
    ("+reduce_logsumexp", "jax.scipy.special.logsumexp"),
):
    _add(
        _names, "input_tensor axis= keepdims=", f"{_call}(_input_tensor, _axis, keepdims=_keepdims)"
    )
_add(
    "math.reduce_euclidean_norm",
    "input_tensor axis= keepdims=",
    "jnp.sqrt(jnp.sum(jnp.square(_input_tensor), _axis, keepdims=_keepdims))",
)
_add("+cumsum math.cumprod", "x axis==0", "jnp.{}(_x, _axis)")
_add("+argmax +argmin", "input axis==0", "jnp.{}(_input, _axis)")
_add("sort argsort", "values axis=", "jnp.{}(_values, _axis)")
_call = "segment_sum(_data, _segment_ids, _num_segments)"
_segments = "data segment_ids num_segments"
_add("math.unsorted_segment_sum", _segments, f"jax.ops.{_call}", f"keras.ops.{_call}")
_call = "jnp.searchsorted(_sorted_sequence, _values, side=_side)"
_add("searchsorted", "sorted_sequence values side=", _call)

# New arrays, and shapes.
_add("zeros ones", "shape dtype=", "jnp.{}(_shape, _dtype)")
_add("zeros_like ones_like", "input dtype=", "jnp.{}(_input, _dtype)")
_call = "keras.ops.convert_to_tensor(_value, _dtype)"
_add("constant", "-value dtype=", "jnp.array(_value, _dtype)", _call)
_add("convert_to_tensor", "-value dtype=", "jnp.asarray(_value, _dtype)", _call)
_add("fill", "dims -value", "jnp.full(_dims, _value)")
_parameters = "num_rows num_columns= batch_shape= dtype="
_add("eye linalg.eye", _parameters, "jnp.eye(_num_rows, _num_columns, dtype=_dtype)")
_add("linspace", "start stop num axis=", "jnp.linspace(_start, _stop, _num, axis=_axis)")
_add("transpose", "a perm=", "jnp.transpose(_a, axes=_perm)")
_add("linalg.matrix_transpose", "a", "jnp.swapaxes(_a, -1, -2)")
_add("reshape", "tensor shape", "jnp.reshape(_tensor, _shape)")
_add("broadcast_to", "input shape", "jnp.broadcast_to(_input, _shape)")
_add("expand_dims", "input axis", "jnp.expand_dims(_input, _axis)")
_add("squeeze", "input axis=", "jnp.squeeze(_input, _axis)")
_add("tile", "input multiples", "jnp.tile(_input, _multiples)")
_add("repeat", "input repeats axis=", "jnp.repeat(_input, _repeats, axis=_axis)")
_add("reverse", "tensor axis", "jnp.flip(_tensor, _axis)")
_add("roll", "input shift axis", "jnp.roll(_input, _shift, _axis)")
_add("image.flip_left_right", "image", "jnp.flip(_image, -2)")
_add("image.flip_up_down", "image", "jnp.flip(_image, -3)")

# Elements.
_call = "jnp.clip(_t, _clip_value_min, _clip_value_max)"
_add("clip_by_value", "t clip_value_min clip_value_max", _call)
_add("gather", "params indices validate_indices= axis==0", "jnp.take(_params, _indices, _axis)")
_add("nn.embedding_lookup", "params ids", "jnp.take(_params, _ids, axis=0)")
_add("gather_nd", "params indices", "_params[tuple(jnp.moveaxis(_indices, -1, 0))]", "")
_methods = {"update": "set", "add": "add", "sub": "subtract", "max": "max", "min": "min"}
for _name, _method in _methods.items():
    _call = f"_tensor.at[tuple(jnp.moveaxis(_indices, -1, 0))].{_method}(_updates)"
    _add(f"tensor_scatter_nd_{_name}", "tensor indices updates", _call, "")

# Matrices.
_add("tensordot linalg.tensordot", "a b axes", "jnp.tensordot(_a, _b, _axes)")
_add("linalg.inv linalg.det linalg.cholesky", "input", "jnp.linalg.{}(_input)")
_add("linalg.eigh", "tensor", "jnp.linalg.eigh(_tensor)")
_add("linalg.matvec", "a b", 'jnp.einsum("...ij,...j->...i", _a, _b)')
_add("linalg.trace", "x", "jnp.trace(_x, axis1=-2, axis2=-1)")
_add("linalg.diag_part", "input", "jnp.diagonal(_input, axis1=-2, axis2=-1)")
_add("linalg.diag", "diagonal", 'jnp.vectorize(jnp.diag, signature="(n)->(n,n)")(_diagonal)', "")
_add(
    "math.l2_normalize nn.l2_normalize linalg.l2_normalize",
    "x axis= epsilon==1e-12",
    "_x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(_x), _axis, keepdims=True), _epsilon))",
)
_add("linalg.global_norm", "t_list", "jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in _t_list))", "")
_add("clip_by_global_norm", "t_list clip_norm", "clip_by_global_norm(_t_list, _clip_norm)", "")
_add(  # 1e-30 keeps the derivative finite at 0, as in TensorFlow
    "clip_by_norm",
    "t clip_norm",
    "_t * jnp.minimum(1, _clip_norm / jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(_t)), 1e-30)))",
)
CLIPS_BY_NORM = {"tensorflow.clip_by_norm", "tensorflow.clip_by_global_norm"}

# Networks.
_add("nn.relu nn.relu6 nn.elu nn.selu", "features", "jax.nn.{}(_features)")
_add("nn.softplus math.softplus", "features", "jax.nn.softplus(_features)")
_softsign = ("jax.nn.soft_sign(_features)", "keras.ops.softsign(_features)")
_add("nn.softsign math.softsign", "features", *_softsign)
_add("nn.silu nn.swish", "features", "jax.nn.silu(_features)")
_add("nn.leaky_relu", "features alpha==0.2", "jax.nn.leaky_relu(_features, _alpha)")
_add("nn.gelu", "features approximate==False", "jax.nn.gelu(_features, approximate=_approximate)")
_add("nn.tanh", "x", "jnp.tanh(_x)")
for _place in ("nn", "math"):
    _names = f"{_place}.softmax {_place}.log_softmax"
    _add(_names, "logits axis=", "jax.nn.{}(_logits, _axis)")
_add("nn.l2_loss", "t", "jnp.sum(jnp.square(_t)) / 2")
_add("nn.bias_add", "value bias", "jnp.add(_value, _bias)")
_add(
    "nn.moments",
    "x axes shift= keepdims=",
    "(jnp.mean(_x, _axes, keepdims=_keepdims), jnp.var(_x, _axes, keepdims=_keepdims))",
)
for _name, _parameters, _call in (
    (
        "sparse_softmax",
        "labels logits",
        "softmax_cross_entropy_with_integer_labels(_logits, _labels)",
    ),
    ("softmax", "labels logits axis=", "softmax_cross_entropy(_logits, _labels, axis=_axis)"),
    ("sigmoid", "labels logits", "sigmoid_binary_cross_entropy(_logits, _labels)"),
):
    _add(f"nn.{_name}_cross_entropy_with_logits", _parameters, f"optax.{_call}", "")

# Functions of functions and of structures.
_add("map_fn", "fn elems", "jax.lax.map(_fn, _elems)", "keras.ops.map(_fn, _elems)")
_add("vectorized_map", "fn elems", "jax.vmap(_fn)(_elems)", "keras.ops.vectorized_map(_fn, _elems)")
_add("recompute_grad", "f", "jax.checkpoint(_f)", "")
for _name, _parameters in (
    ("flatten", "structure"),
    ("pack_sequence_as", "structure flat_sequence"),
):
    _call = f"keras.tree.{_name}({', '.join('_' + x for x in _parameters.split())})"
    _add(f"nest.{_name}", _parameters, _call, _call)

# Random numbers in Python. On replicas they would need a key for each replica and step.
_RANDOM = {
    "normal": "shape mean= stddev= dtype=",
    "truncated_normal": "shape mean= stddev= dtype=",
    "categorical": "logits num_samples",
    "shuffle": "value",
}
RANDOM = {"tensorflow.random.uniform"}  # its template is in `irregular_operations`
for _name, _parameters in _RANDOM.items():
    _arguments = ", ".join(f"_{x.partition('=')[0]}" for x in _parameters.split())
    _add(f"random.{_name}", _parameters, f"keras.random.{_name}({_arguments})", "")
    RANDOM.add(f"tensorflow.random.{_name}")
for _name in ("random.set_seed", "compat.v1.set_random_seed", "compat.v1.random.set_random_seed"):
    _add(_name, "-seed", "keras.utils.set_random_seed(_seed)", "")
    RANDOM.add(f"tensorflow.{_name}")

# The profiler. Calls with options stay, because JAX does not have all of them.
_add("profiler.experimental.start", "-logdir", "jax.profiler.start_trace(_logdir)", "")
_add("profiler.experimental.stop", "", "jax.profiler.stop_trace()", "")
_add("profiler.experimental.server.start", "-port", "jax.profiler.start_server(_port)", "")

# Functions on variables.
_add("keras.backend.set_value", "-x -value", "_x.assign(_value)")
_add("keras.backend.get_value", "-x", "np.asarray(_x)[()]", "keras.ops.convert_to_numpy(_x)")
_add("keras.backend.count_params", "-p", "np.prod(_p.shape, dtype=int)")

# Functions of `keras.backend` that Keras 3 has only for its TensorFlow backend.
_BACKEND = {
    "abs exp log sqrt square sign round sigmoid relu softplus softsign": ("x", "{}(_x)"),
    "tanh sin cos transpose shape": ("x", "{}(_x)"),
    "sum mean max min prod var": ("x axis= keepdims=", "{}(_x, _axis, keepdims=_keepdims)"),
    "std any all logsumexp": ("x axis= keepdims=", "{}(_x, _axis, keepdims=_keepdims)"),
    "maximum minimum equal not_equal greater greater_equal less less_equal": ("x y", "{}(_x, _y)"),
    "cast": ("x dtype", "cast(_x, _dtype)"),
    "clip": ("x min_value max_value", "clip(_x, _min_value, _max_value)"),
    "pow": ("x a", "power(_x, _a)"),
    "ones_like zeros_like": ("x dtype=", "{}(_x, _dtype)"),
    "ones zeros": ("shape dtype=", "{}(_shape, _dtype)"),
    "reshape": ("x shape", "reshape(_x, _shape)"),
    "expand_dims": ("x axis==-1", "expand_dims(_x, _axis)"),
    "squeeze": ("x axis", "squeeze(_x, _axis)"),
    "concatenate": ("tensors axis==-1", "concatenate(_tensors, _axis)"),
    "stack softmax": ("x axis=", "{}(_x, _axis)"),
    "flatten": ("x", "reshape(_x, (-1,))"),
    "argmax argmin": ("x axis==-1", "{}(_x, _axis)"),
    "stop_gradient": ("variables", "stop_gradient(_variables)"),
    "binary_crossentropy categorical_crossentropy sparse_categorical_crossentropy": (
        "target output from_logits=",
        "{}(_target, _output, from_logits=_from_logits)",
    ),
}
for _names, (_parameters, _call) in _BACKEND.items():
    for _name in _names.split():
        _call_of_name = f"keras.ops.{_call.replace('{}', _name)}"
        _add(f"keras.backend.{_name}", _parameters, _call_of_name, _call_of_name)
