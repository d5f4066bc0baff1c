"""Honours `out_sharding=` for axes inside a replica, as `jax.lax.with_sharding_constraint` does.

JAX has this argument for meshes with Explicit axes, and refuses it where they are Auto, as those
inside a replica are. While a replica function runs, such a request is let through instead. Where
JAX would act on it, the value that it is for is computed without it and then constrained: by the
operation itself (`_OPERATIONS`), or by a function of JAX which does not act on it, or acts on
another value (`_FUNCTIONS`). Elsewhere, and where this JAX lacks one of them, it is refused.

JAX is touched when the first replica function is traced, and for other code it stays as it is.
"""

import contextlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax.extend import source_info_util
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tpudist.xla import internals
from tpudist.xla.hlo.source_lines import line_of_call

# The operations that take a sharding of their result: where they are, and the parameter.
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
# einsum: of one operand it leaves the sharding out, or gives it to a sum before a transposition.
# take: slices ignore it. one_hot, arange: it is given to what the result is computed from.
_FUNCTIONS = {
    "_einsum": ("numpy.einsum", "out_sharding"),
    "rewriting_take": ("numpy.indexing", "out_sharding"),
    "_one_hot": ("nn.functions", "out_sharding"),
    "_arange": ("numpy.lax_numpy", "out_sharding"),
}
_REQUESTS = "canonicalize_sharding"  # of all that take an out_sharding
_MESH_OF_AUTO_AXES = "_get_new_mesh"  # of auto_axes, in "pjit"

# By what it is called in JAX's errors: what must be in place for a request to be honoured.
_AUTO = {"reshard_p", _MESH_OF_AUTO_AXES}  # as jax.sharding.auto_axes
_FILLED = {"broadcast_in_dim_p", "reshard_p"}
_HONOURED: dict[str, set[str]] = {
    "reshard": {"reshard_p"},
    "dot_general": {"dot_general_p", "conv_general_dilated_p"},  # convolutions call themselves so
    "ragged_dot_general": {"ragged_dot_general_p"},
    "einsum": {"_einsum"} | _AUTO,
    "broadcast_in_dim": _FILLED,
    "jnp.broadcast_to": _FILLED,
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
    "repeat": _AUTO,
}
_HONOURED |= dict.fromkeys("jnp.zeros jnp.ones full full_like".split(), _FILLED)
_HONOURED |= dict.fromkeys("jnp.zeros_like jnp.ones_like".split(), _FILLED)
_HONOURED |= dict.fromkeys(
    ".set .add .subtract .multiply .divide .power .min .max segment_sum segment_prod segment_min "
    "segment_max bits uniform normal randint truncated_normal bernoulli categorical gumbel "
    "permutation".split(),
    _AUTO,
)


class _Trace:
    """The requests of one replica function that have been let through and not been met yet."""

    def __init__(self):
        self.waiting: list[tuple[frozenset[str], str, str]] = []  # axes, by what, its line


_trace: ContextVar[_Trace | None] = ContextVar("honours out_sharding", default=None)
_in_place: set[str] = set()
_lock = threading.Lock()


@contextlib.contextmanager
def honour_out_shardings() -> Iterator[None]:
    """Constrains values to the `out_sharding=` that is asked for in this thread.

    Raises:
        NotImplementedError: A request has met no value: this JAX does otherwise than those known.
    """
    _watch_requests()
    trace = _Trace()
    token = _trace.set(trace)
    try:
        yield
    finally:
        _trace.reset(token)
    for _, api, line in trace.waiting:
        raise NotImplementedError(
            f"{line} passes out_sharding to {api}, but jax {jax.__version__} ignored it. Remove "
            "out_sharding and split the result: jax.lax.with_sharding_constraint(x, spec)."
        )


def list_missing_parts() -> list[str]:
    """The functions and operations that this JAX lacks: what needs them is refused."""
    _watch_requests()
    _watch_results()
    return sorted({_REQUESTS, _MESH_OF_AUTO_AXES, *_OPERATIONS, *_FUNCTIONS} - _in_place)


def _watch_requests() -> None:
    """Sees what is asked for, from now on; to be called before any request."""
    with _lock:
        if "requests" not in _in_place:
            _in_place.add("requests")
            source_info_util.register_exclusion(__file__)  # what calls this is the user's line
            if internals.wrap_function("sharding_impls", _REQUESTS, _let_through):
                _in_place.add(_REQUESTS)
            if internals.wrap_function("pjit", _MESH_OF_AUTO_AXES, _keep_mesh):
                _in_place.add(_MESH_OF_AUTO_AXES)


def _watch_results() -> None:
    """Sees the values that requests are for, from the first one on: others cost nothing so."""
    with _lock:
        if "results" in _in_place:
            return
        _in_place.add("results")
        for name, (module, parameter) in _OPERATIONS.items():
            if internals.wrap_operation(module, name, _constrain_operation(name, parameter)):
                _in_place.add(name)
        for name, (module, parameter) in _FUNCTIONS.items():
            if internals.wrap_function(module, name, _constrain_function(parameter)):
                _in_place.add(name)


def _let_through(canonicalize: Callable[..., Any]) -> Callable[..., Any]:
    """What JAX makes of each `out_sharding`, with axes inside a replica where that is possible."""

    def canonicalize_sharding(sharding: Any, api: str, *args: Any, **kwargs: Any) -> Any:
        trace = _trace.get() if sharding is not None else None
        asked = _request(sharding) if trace is not None else None
        if trace is None or asked is None or api not in _HONOURED:
            return canonicalize(sharding, api, *args, **kwargs)
        _watch_results()
        if not _HONOURED[api] <= _in_place:
            return canonicalize(sharding, api, *args, **kwargs)
        if api == "dot_general" and _is_rearranged(inspect.currentframe()):
            api = "matmul, which moves or removes dims after the product,"
            return canonicalize(sharding, api, *args, **kwargs)
        # The work of einsum is traced once for all calls that are alike: `_einsum` is seen once.
        if api != "einsum":
            trace.waiting.append((frozenset(_axes_of(asked)), api, line_of_call()))
        return asked

    return canonicalize_sharding


def _request(sharding: Any) -> NamedSharding | None:
    """What is asked for, if it is a split by Auto axes of the mesh that is in use."""
    if not isinstance(sharding, NamedSharding | PartitionSpec):
        return None
    names = _axes_of(sharding)
    if not names:  # that of a value has none, and asks for nothing
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(sharding, NamedSharding):
        # Of a mesh with the same axes, as of strategy.mesh, it is taken by the names of these.
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
    """Whether it is jnp.matmul that asks, and what it gives has its dims in another order.

    JAX splits the product of it by the spec before it moves the dims, with Explicit axes too.
    """
    frame = frame.f_back if frame is not None else None  # out of what is wrapped here
    while frame is not None and frame.f_globals.get("__name__") == "jax._src.lax.lax":
        frame = frame.f_back  # lax.dot_general
    if frame is None or frame.f_code.co_name != "matmul":
        return False
    if not str(frame.f_globals.get("__name__")).startswith("jax."):
        return False
    order, dropped = frame.f_locals.get("perm"), frame.f_locals.get("both_squeeze")
    return order is None or dropped is None or bool(dropped) or list(order) != sorted(order)


def _constrain(value: Any, asked: NamedSharding) -> Any:
    trace = _trace.get()
    assert trace is not None
    axes = frozenset(_axes_of(asked))
    trace.waiting[:] = [x for x in trace.waiting if x[0] != axes]
    return jax.lax.with_sharding_constraint(value, asked.spec)


def _constrain_operation(name: str, parameter: str) -> Callable[..., Any]:
    def wrap(bind: Callable[..., Any]) -> Callable[..., Any]:
        def bind_operation(*operands: Any, **params: Any) -> Any:
            asked = params.get(parameter)
            if asked is None or _trace.get() is None:
                return bind(*operands, **params)
            request = _request(asked)
            if name == "reshard_p" and request is not None:
                return _constrain(operands[0], request)
            if name == "reshard_p" and _lies_so(operands[0], asked):
                return operands[0]  # arguments of auto_axes: no operation is left of it
            if request is None:
                return bind(*operands, **params)
            return _constrain(bind(*operands, **params | {parameter: None}), request)

        return bind_operation

    return wrap


def _lies_so(value: Any, sharding: Any) -> bool:
    return isinstance(value, jax.Array) and jax.typeof(value).sharding == sharding


def _constrain_function(parameter: str) -> Callable[..., Any]:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def compute(*args: Any, **kwargs: Any) -> Any:
            if _trace.get() is None:
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            request = _request(given.arguments.get(parameter))
            if request is None:
                return function(*args, **kwargs)
            given.arguments[parameter] = None
            return _constrain(function(*given.args, **given.kwargs), request)

        return compute

    return wrap


def _keep_mesh(get_new_mesh: Callable[..., Any]) -> Callable[..., Any]:
    """The mesh of `auto_axes`: with no Explicit axes it is the one in use, Manual ones or not.

    What it has computed is resharded then, which is a request like others.
    """

    def keep_mesh(axes: Any, axis_type: Any, *args: Any, **kwargs: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        explicit = mesh.empty or AxisType.Explicit in mesh.axis_types
        if _trace.get() is None or axis_type != AxisType.Auto or explicit:
            return get_new_mesh(axes, axis_type, *args, **kwargs)
        _watch_results()
        # Axes that are not those which are Auto already: else it would do nothing at all.
        return types.SimpleNamespace(prev=mesh, new=mesh, axes=(None,))

    return keep_mesh
