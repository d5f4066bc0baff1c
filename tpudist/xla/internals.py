"""Wraps the private APIs of JAX that tpudist needs; the only module that imports `jax._src`.

Each wrapper has a test in `tests/policy/test_jax_versions.py`, which names the version of JAX that
removed the API.
"""

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import config, core, distributed, mesh, sharding_impls, xla_bridge
from jax._src.interpreters import mlir, pxla
from jax.extend import backend
from jaxlib import _hlo, _jax  # pyright: ignore[reportAttributeAccessIssue]

_is_x64 = functools.partial(getattr, config.enable_x64, "value")
# JAX aborts a process after this time without a heartbeat. tpudist detects lost processes itself
# (`processes.process_watch`), so the time is practically infinite.
_FOREVER_S = 10_000_000


def coordination_client() -> Any:
    """Returns the client of JAX's coordination service (a key-value store); None in one process."""
    # Orbax uses the same private attribute.
    return distributed.global_state.client


def coordinator_host() -> str:
    """Returns the address of the first process's host for the others; empty in one process."""
    address = distributed.global_state.coordinator_address or ""
    return address.rpartition(":")[0].strip("[]")


def start_coordination_service(address: str, num_processes: int) -> Any:
    """Starts a coordination service for processes that tpudist supervises.

    Keep the returned object: the service ends with it, and aborts all connected processes.

    Args:
        address: `host:port` on which the service listens.
        num_processes: Number of processes that will connect.
    """
    return _jax.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=_FOREVER_S,
        shutdown_timeout=1,
    )


def connect_coordination_service(
    address: str, num_processes: int, process_id: int
) -> Callable[[], None]:
    """Connects to a coordination service; blocks until all processes have connected.

    There is no timeout, because JAX would abort the process then.

    Args:
        address: Address of the service.
        num_processes: Number of processes that connect.
        process_id: Number of this process.

    Returns:
        A function without arguments that makes this process a member of the group. Call it while
        the process is in no other group (`leave_runtime`).

    Raises:
        jax.errors.JaxRuntimeError: If there is no service.
    """
    client = _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=_FOREVER_S,
        heartbeat_timeout=_FOREVER_S,
        use_compression=True,
        shutdown_on_destruction=False,  # a shutdown would wait for processes that have died
    )
    client.connect()
    # The destructor of a client aborts the process, too. So the client is never destroyed: this
    # reference is leaked on purpose.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))

    def join() -> None:
        state = distributed.global_state
        state.client, state.coordinator_address = client, address
        state.process_id, state.num_processes = process_id, num_processes

    return join


def leave_runtime(keep: bool) -> None:
    """Leaves the group of processes and drops all devices, so that the process can join another.

    Existing arrays and programs become unusable.

    Args:
        keep: Whether to keep the old runtime in memory forever, because an operation in it may
            never end: destroying the runtime would wait for that operation.
    """
    state = distributed.global_state
    if keep:  # leaks a reference on purpose
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend.get_backend()))
    state.client, state.preemption_sync_manager = None, None
    state.process_id, state.num_processes, state.coordinator_address = 0, 1, None
    jax.clear_caches()
    backend.clear_backends()


def call_at_preemption_poll(callback: Callable[[], None]) -> bool:
    """Calls a function once, when this process first asks JAX whether it is being preempted.

    Returns:
        Whether JAX has such a service here.
    """
    # The first call of the replacement removes it again, so later polls cost nothing.
    state = distributed.global_state
    manager = getattr(state, "preemption_sync_manager", None)
    if manager is None:
        return False

    class Manager:
        def reached_sync_point(self, step_id: int) -> bool:
            callback()
            state.preemption_sync_manager = manager
            return manager.reached_sync_point(step_id)

        def __getattr__(self, name: str) -> Any:
            return getattr(manager, name)

    state.preemption_sync_manager = Manager()
    return True


def make_key_of_trace_caches() -> Any:
    """Returns a new setting that is part of the key of JAX's trace caches.

    A function is traced again under another value of the setting. Call this only once per process,
    because a new setting invalidates all existing traces. Returns None if this JAX does not
    support it.
    """
    try:
        return config.config_ext.Config(
            "tpudist_trace", None, include_in_jit_key=False, include_in_trace_context=True
        )
    except (AttributeError, TypeError):
        return None


def settings_of_traces() -> tuple[Any, ...]:
    """Returns the values of JAX's settings that affect a trace, such as `jax_enable_x64`.

    Returns an empty tuple if this JAX does not expose them.
    """
    try:
        values = zip(config.trace_context_names(), config.trace_context(), strict=True)
        return tuple(value for name, value in values if name.startswith("jax_"))
    except (AttributeError, TypeError, ValueError):
        return ()


def is_described(device: jax.Device) -> bool:
    """Whether a device belongs to a described topology (`xla.topology`) and cannot run programs."""
    return type(device.client).__name__ == "CompileOnlyPyClient"  # the class is not public


def replace_devices(
    show: Callable[[Callable[..., Any]], Callable[..., Any]],
    hide: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replaces the functions with which JAX itself finds devices, for example in `jax.pmap`.

    Args:
        show: Returns the replacement of a function that returns devices.
        hide: Returns the replacement of a function whose answers JAX stores forever.
    """
    xla_bridge.devices = show(xla_bridge.devices)
    for name in ("local_devices", "process_count"):
        setattr(xla_bridge, name, hide(vars(xla_bridge)[name]))


def replace_backend(find: Callable[[], Any]) -> None:
    """Replaces the client that JAX passes to callbacks while it lowers a program.

    Args:
        find: Returns the client for programs of its platform; None for that of the program.
    """
    plain = mlir.ModuleContext.get_backend

    @functools.wraps(plain)
    def get_backend(self, optional: bool = False) -> Any:
        client = find()
        if client is not None and tuple(self.platforms) == (client.platform,):
            return client
        return plain(self, optional)

    mlir.ModuleContext.get_backend = get_backend


def make_evaluation(evaluate: Callable[[Any, Any, list[Any], dict[str, Any]], Any]) -> Any:
    """Returns a trace of JAX for `use_evaluation`, which evaluates operations immediately.

    Args:
        evaluate: Called with the trace, a primitive, its arguments and its parameters; returns
            the results.

    Raises:
        RuntimeError: If this JAX has no such traces.
    """
    try:

        class Evaluation(core.EvalTrace):
            def process_primitive(self, primitive, tracers, params, /):
                return evaluate(self, primitive, tracers, params)

        return Evaluation()
    except (AttributeError, TypeError) as error:
        raise RuntimeError(
            "To run replica functions eagerly, tpudist itself evaluates the operations of JAX, but "
            f"jax {jax.__version__} does not allow that. Install a jax that tpudist supports: see "
            "CONTRIBUTING.md. Or do not use strategy.debug()."
        ) from error


def use_evaluation(evaluation: Any = None) -> contextlib.AbstractContextManager:
    """Evaluates operations of this thread with `evaluation`; by default like JAX itself."""
    return core.set_current_trace(core.eval_trace if evaluation is None else evaluation)


def name_axis(name: str, size: int) -> contextlib.AbstractContextManager:
    """Allows collectives over an axis of this name and size in this thread."""
    return core.extend_axis_env_nd([(name, size)])


def name_axes(mesh: jax.sharding.AbstractMesh) -> contextlib.AbstractContextManager:
    """Allows collectives over the manual axes of an abstract mesh in this thread."""
    return core.extend_axis_env_nd([(axis, mesh.shape[axis]) for axis in mesh.manual_axes])


@contextlib.contextmanager
def leave_axes() -> Iterator[None]:
    """Removes the names of all axes in this thread, as outside of traces."""
    before = core.trace_ctx.axis_env
    core.trace_ctx.set_axis_env(core.top_axis_env)
    try:
        yield
    finally:
        core.trace_ctx.set_axis_env(before)


def leave_devices() -> contextlib.AbstractContextManager:
    """Hides the devices of `jax.set_mesh` in this thread; the abstract mesh stays."""
    # A traced function may compute concrete values (`jax.ensure_compile_time_eval`). JAX would
    # compute them on the devices of the mesh, which fails if an axis of the abstract mesh is
    # Manual.
    return sharding_impls._internal_use_concrete_mesh(mesh.empty_concrete_mesh)


def place_explicitly() -> contextlib.AbstractContextManager:
    """Makes transfers in this thread explicit, like `jax.device_put`, for `jax.transfer_guard`."""
    return config.explicit_device_put_scope()


def make_array(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, read: Callable[..., np.ndarray]
) -> jax.Array:
    """Same as `jax.make_array_from_callback`, in half its time for NumPy arrays."""
    # JAX creates the type of the array, and converts and compares the parts, in each call.
    devices, indices, part_shape = _places_of_parts(sharding, shape)
    parts = [read(index) for index in indices]
    if parts and set(map(type, parts)) == {np.ndarray}:
        kinds = {(x.dtype, x.shape) for x in parts}
        dtype = parts[0].dtype
        try:
            array_type = _type_of_array(sharding, shape, dtype, _is_x64())
            put = pxla.batched_device_put
        except AttributeError:  # this JAX has other private functions
            return jax.make_array_from_callback(shape, sharding, read)
        if array_type is not None and kinds == {(dtype, part_shape)}:
            return put(array_type, sharding, parts, devices)
    return jax.make_array_from_callback(shape, sharding, read)


@functools.lru_cache(maxsize=256)
def _places_of_parts(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> tuple[list[jax.Device], list[Any], tuple[int, ...]]:
    """Returns this process's devices, the index of the part of each, and the shape of a part."""
    index_of = sharding.addressable_devices_indices_map(shape)
    return list(index_of), list(index_of.values()), sharding.shard_shape(shape)


@functools.lru_cache(maxsize=256)
def _type_of_array(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], dtype: np.dtype, x64: bool
) -> Any:
    """Returns the type of an array; None if JAX would convert the dtype, or has no such arrays."""
    del x64  # part of the key of the cache; `canonicalize_dtype` reads the setting itself
    if not any(jax.numpy.issubdtype(dtype, kind) for kind in (np.number, np.bool_)):
        return None
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return None
    return core.update_aval_with_sharding(core.ShapedArray(shape, dtype), sharding)


def trace_reader() -> tuple[Callable[[], Any], Any]:
    """Returns a function without a Python frame that reads the current trace, and the outermost.

    Outside of all traces it returns the outermost one.
    """
    return functools.partial(getattr, core.trace_state_strong_ref, "value"), core.eval_trace


def mesh_setters() -> tuple[Callable[[Any], Any], ...]:
    """Returns functions without a Python frame that do what `jax.set_mesh` does in this thread.

    Returns:
        `swap` and `set` for the abstract mesh, and for the mesh. `swap` returns the value before.
    """
    owner: Any = mesh if hasattr(mesh, "device_context") else config  # they moved in jax 0.11
    abstract, concrete = owner.abstract_mesh_context_manager, owner.device_context
    return abstract.swap_local, abstract.set_local, concrete.swap_local, concrete.set_local


def state_of_setting(name: str) -> Any:
    """Returns the object that holds a setting, with its value in this thread as `value`."""
    return config.config_states.get(name)


def settings_of_thread() -> list[tuple[Any, Any]]:
    """Returns JAX's settings and their values in this thread, for `set_in_thread`."""
    # Some are not in `config_states`, such as the current trace and mesh.
    settings = {id(x): x for x in config.config_states.values()}
    for module in (config, core, mesh):
        settings |= {
            id(x): x for x in vars(module).values() if isinstance(x, config.config_ext.Config)
        }
    return [(x, x.get_local()) for x in settings.values()]


def set_in_thread(settings: list[tuple[Any, Any]]) -> None:
    """Sets the values from `settings_of_thread`, of this thread or another one, in this thread."""
    for setting, value in settings:
        if setting.get_local() is not value:
            setting.set_local(value)
            # Only settings that JAX's C++ code reads have this hook.
            update = getattr(setting, "_update_thread_local_hook", None)
            if update is not None:
                update(None if value is config.config_ext.unset else value)


def expand_hlo(text: str) -> str:
    """Returns the text of an HLO module as `to_string` writes it, without short forms."""
    return _hlo.hlo_module_from_text(text).to_string()


def wrap_function(module: str, name: str, wrap: Callable[[Any], Any]) -> bool:
    """Replaces a function of JAX by `wrap(function)` in all modules of JAX.

    Default arguments and decorators that refer to the function keep the original.

    Args:
        module: Module of the function, below `jax._src`.
        name: Name of the function.
        wrap: Called with the function; returns its replacement.

    Returns:
        Whether this JAX has such a function.
    """
    try:
        function = vars(importlib.import_module(f"jax._src.{module}"))[name]
    except (ImportError, KeyError):
        return False
    replacement = functools.wraps(function)(wrap(function))
    for module_name, loaded in list(sys.modules.items()):
        if module_name.startswith("jax.") and vars(loaded).get(name) is function:
            setattr(loaded, name, replacement)
    return True


def wrap_operation(module: str, name: str, wrap: Callable[[Any], Any]) -> bool:
    """Replaces `bind` of a primitive of JAX by `wrap(bind)`.

    Args:
        module: Module of the primitive, below `jax._src`.
        name: Name of the primitive.
        wrap: Called with `bind`; returns its replacement, which gets operands and parameters.

    Returns:
        Whether this JAX has such a primitive.
    """
    try:
        primitive = vars(importlib.import_module(f"jax._src.{module}"))[name]
        primitive.bind = wrap(primitive.bind)
    except (ImportError, KeyError, AttributeError):
        return False
    return True
