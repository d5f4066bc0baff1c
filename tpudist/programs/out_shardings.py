"""Applies `out_sharding=` to axes inside a replica, as `jax.lax.with_sharding_constraint` does.

JAX supports this argument on meshes with Explicit axes, and rejects it for Auto axes, as the axes
inside a replica are. The first trace of a replica function wraps functions of JAX. The wrappers act
only while a replica function is traced; other code is not affected.
"""

# `_let_through` accepts a request that JAX would reject. Then a value must be constrained for it:
# either the result of the primitive that has the request as a parameter (`_OPERATIONS`), or the
# result of a function of JAX that would ignore the request or apply it to another value
# (`_FUNCTIONS`). Each accepted request is in `_waiting` until a value is constrained to its axes. A
# request that still waits at the end of the trace raises an error: this JAX ignored it. That is
# missed if another request for the same axes was applied later. Requests of other functions, and of
# functions whose wrapped parts this JAX lacks, are rejected as by JAX.

import contextlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tpudist.xla import internals
from tpudist.xla.user_code import line_of_call

# The primitives with a sharding of the result: their module in JAX, and the parameter.
_OPERATIONS = {
    "reshard_p": ("pjit", "dst_sharding"),
    "dot_general_p": ("lax.lax", "out_sharding"),
    "ragged_dot_general_p": ("lax.lax", "out_sharding"),
    "conv_general_dilated_p": ("lax.convolution", "out_sharding"),
    "broadcast_in_dim_p": ("lax.lax", "sharding"),
    "reshape_p": ("lax.lax", "sharding"),
    "reduce_sum_p": ("lax.lax", "out_sharding"),
    "reduce_max_p": ("lax.lax", "out_sharding"),
    "reduce_min_p": ("lax.lax", "out_sharding"),
    "iota_p": ("lax.lax", "sharding"),
    "empty_p": ("lax.lax", "out_sharding"),
}
# einsum ignores the sharding of one operand, or applies it to a sum before a transposition; slices
# of take ignore it; one_hot and arange apply it to a value that the result is computed from.
_FUNCTIONS = {
    "_einsum": ("numpy.einsum", "out_sharding"),
    "rewriting_take": ("numpy.indexing", "out_sharding"),
    "_one_hot": ("nn.functions", "out_sharding"),
    "_arange": ("numpy.lax_numpy", "out_sharding"),
}
_REQUESTS = "canonicalize_sharding"  # called by all functions that accept an out_sharding
_MESH_OF_AUTO_AXES = "_get_new_mesh"  # called by auto_axes, in "pjit"

# The functions whose requests are applied, by their name in JAX's errors, with the parts of JAX
# that must have been wrapped.
_BY_AUTO_AXES = {"reshard_p", _MESH_OF_AUTO_AXES}  # functions that use jax.sharding.auto_axes
_BY_BROADCAST = {"broadcast_in_dim_p", "reshard_p"}
_SUPPORTED: dict[str, set[str]] = {
    "reshard": {"reshard_p"},
    "dot_general": {"dot_general_p", "conv_general_dilated_p"},  # convolutions use this name too
    "ragged_dot_general": {"ragged_dot_general_p"},
    "einsum": {"_einsum"} | _BY_AUTO_AXES,
    "broadcast_in_dim": _BY_BROADCAST,
    "jnp.broadcast_to": _BY_BROADCAST,
    "reshape": {"reshape_p"},
    "jnp.reshape": {"reshape_p"},
    "reduce_sum": {"reduce_sum_p"},
    "reduce_max": {"reduce_max_p"},
    "reduce_min": {"reduce_min_p"},
    "broadcasted_iota": {"iota_p"},
    "jnp.arange": {"_arange"},
    "jnp.empty": {"empty_p"},
    "lax.empty": {"empty_p"},
    "jax.nn.one_hot": {"_one_hot"},
    ".get": {"rewriting_take"},
    "take": {"rewriting_take"},
    "repeat": _BY_AUTO_AXES,
}
_SUPPORTED |= dict.fromkeys("jnp.zeros jnp.ones full full_like".split(), _BY_BROADCAST)
_SUPPORTED |= dict.fromkeys("jnp.zeros_like jnp.ones_like".split(), _BY_BROADCAST)
_SUPPORTED |= dict.fromkeys(
    ".set .add .subtract .multiply .divide .power .min .max segment_sum segment_prod segment_min "
    "segment_max bits uniform normal randint truncated_normal bernoulli categorical gumbel "
    "permutation".split(),
    _BY_AUTO_AXES,
)


class _Request(NamedTuple):
    """An accepted `out_sharding`: its axes, JAX's name of the function, and the user's line."""

    axes: frozenset[str]
    api: str
    line: str


# The accepted requests of a replica function for which no value was constrained yet. None outside.
_waiting: ContextVar[list[_Request] | None] = ContextVar("tpudist_out_shardings", default=None)
_wrapped: set[str] = set()  # the parts of JAX that are wrapped, guarded by the lock
_lock = threading.Lock()


@contextlib.contextmanager
def apply_out_shardings() -> Iterator[None]:
    """Constrains values to the `out_sharding=` of functions that this thread calls.

    Raises:
        NotImplementedError: If a request was not applied: this JAX works differently from the known
            versions.
    """
    _watch_requests()
    waiting: list[_Request] = []
    token = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(token)
    if waiting:
        raise NotImplementedError(
            f"{waiting[0].line} passes out_sharding to {waiting[0].api}, but jax {jax.__version__} "
            "ignored it. Remove out_sharding and split the result: "
            "jax.lax.with_sharding_constraint(x, spec)."
        )


def list_missing_parts() -> list[str]:
    """Returns the functions and primitives that this JAX lacks; requests that need them fail."""
    _watch_requests()
    _watch_results()
    return sorted({_REQUESTS, _MESH_OF_AUTO_AXES, *_OPERATIONS, *_FUNCTIONS} - _wrapped)


def _watch_requests() -> None:
    """Wraps the functions of JAX that check requests; must run before any request."""
    with _lock:
        if "requests" not in _wrapped:
            _wrapped.add("requests")
            source_info_util.register_exclusion(__file__)  # the caller's line is the user's line
            if internals.wrap_function("sharding_impls", _REQUESTS, _let_through):
                _wrapped.add(_REQUESTS)
            if internals.wrap_function("pjit", _MESH_OF_AUTO_AXES, _keep_mesh):
                _wrapped.add(_MESH_OF_AUTO_AXES)


def _watch_results() -> None:
    """Wraps the primitives and functions that compute the values.

    Runs at the first request, so that programs without requests are traced at full speed.
    """
    with _lock:
        if "results" in _wrapped:
            return
        _wrapped.add("results")
        for name, (module, parameter) in _OPERATIONS.items():
            if internals.wrap_operation(module, name, _constrain_operation(name, parameter)):
                _wrapped.add(name)
        for name, (module, parameter) in _FUNCTIONS.items():
            if internals.wrap_function(module, name, _constrain_function(parameter)):
                _wrapped.add(name)


def _let_through(canonicalize: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps JAX's check of an `out_sharding`, so that it accepts axes inside a replica."""

    def canonicalize_sharding(sharding: object, api: str, *args: Any, **kwargs: Any) -> Any:
        waiting = _waiting.get() if sharding is not None else None
        request = _sharding_inside(sharding) if waiting is not None else None
        if waiting is None or request is None or api not in _SUPPORTED:
            return canonicalize(sharding, api, *args, **kwargs)
        _watch_results()
        if not _SUPPORTED[api] <= _wrapped:
            return canonicalize(sharding, api, *args, **kwargs)
        if api == "dot_general" and _is_rearranged(inspect.currentframe()):
            api = "matmul, which moves or removes dims after the product,"
            return canonicalize(sharding, api, *args, **kwargs)
        # JAX caches the trace of `_einsum` for equal calls, so a second call meets no wrapper.
        if api != "einsum":
            waiting.append(_Request(frozenset(_axes_of(request)), api, line_of_call()))
        return request

    return canonicalize_sharding


def _sharding_inside(sharding: object) -> NamedSharding | None:
    """Returns the requested split by Auto axes of the current mesh; None for anything else."""
    if not isinstance(sharding, NamedSharding | PartitionSpec):
        return None
    names = _axes_of(sharding)
    if not names:  # the sharding of an unsplit value
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(sharding, NamedSharding):
        # Another mesh with the same axes, such as strategy.mesh, is accepted by the axes' names.
        if dict(sharding.mesh.shape) != dict(mesh.shape):
            return None
        sharding = sharding.spec
    types_of_axes = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(types_of_axes.get(name) != AxisType.Auto for name in names):
        return None
    if sharding.unreduced or sharding.reduced:
        return None
    return NamedSharding(mesh, sharding)


def _axes_of(sharding: NamedSharding | PartitionSpec) -> list[str]:
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return [name for entry in entries for name in entry if isinstance(name, str)]


def _is_rearranged(frame: types.FrameType | None) -> bool:
    """Returns whether jnp.matmul makes the request, and moves or removes dims after the product.

    JAX applies the spec to the product before it moves the dims, with Explicit axes too.
    """
    frame = frame.f_back if frame is not None else None  # leave the wrapper
    while frame is not None and frame.f_globals.get("__name__") == "jax._src.lax.lax":
        frame = frame.f_back  # lax.dot_general
    if frame is None or frame.f_code.co_name != "matmul":
        return False
    if not str(frame.f_globals.get("__name__")).startswith("jax."):
        return False
    # The names of local variables in jax 0.10 to 0.12. Without them, the request is rejected.
    order, dropped = frame.f_locals.get("perm"), frame.f_locals.get("both_squeeze")
    if order is None or dropped is None:
        return True
    return bool(dropped) or list(order) != sorted(order)


def _constrain(value: jax.Array, request: NamedSharding) -> jax.Array:
    waiting = _waiting.get()
    assert waiting is not None
    # Requests are matched by their axes: the value may be computed inside a nested function of JAX,
    # which does not know the request.
    axes = frozenset(_axes_of(request))
    waiting[:] = [x for x in waiting if x.axes != axes]
    return jax.lax.with_sharding_constraint(value, request.spec)


def _constrain_operation(name: str, parameter: str) -> Callable[..., Any]:
    def wrap(bind: Callable[..., Any]) -> Callable[..., Any]:
        def bind_operation(*operands: Any, **params: Any) -> Any:
            sharding = params.get(parameter)
            if sharding is None or _waiting.get() is None:
                return bind(*operands, **params)
            request = _sharding_inside(sharding)
            if name == "reshard_p" and request is not None:
                return _constrain(operands[0], request)
            if name == "reshard_p" and _has_sharding(operands[0], sharding):
                return operands[0]  # an argument of auto_axes: nothing to do
            if request is None:
                return bind(*operands, **params)
            return _constrain(bind(*operands, **params | {parameter: None}), request)

        return bind_operation

    return wrap


def _has_sharding(value: object, sharding: object) -> bool:
    return isinstance(value, jax.Array) and jax.typeof(value).sharding == sharding


def _constrain_function(parameter: str) -> Callable[..., Any]:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def compute(*args: Any, **kwargs: Any) -> Any:
            if _waiting.get() is None:
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            request = _sharding_inside(bound.arguments.get(parameter))
            if request is None:
                return function(*args, **kwargs)
            bound.arguments[parameter] = None
            return _constrain(function(*bound.args, **bound.kwargs), request)

        return compute

    return wrap


def _keep_mesh(get_new_mesh: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the choice of a mesh by `auto_axes`: without Explicit axes it is the current mesh.

    `auto_axes` then reshards its result, which is a request like others.
    """

    def keep_mesh(axes: object, axis_type: object, *args: Any, **kwargs: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        explicit = mesh.empty or AxisType.Explicit in mesh.axis_types
        if _waiting.get() is None or axis_type != AxisType.Auto or explicit:
            return get_new_mesh(axes, axis_type, *args, **kwargs)
        _watch_results()
        # With axes that are Auto already, JAX would do nothing at all. It reads only these three
        # attributes, and whether `axes` is empty.
        return types.SimpleNamespace(prev=mesh, new=mesh, axes=(None,))

    return keep_mesh
