"""The private doors of JAX: what tpudist needs and JAX offers nowhere in public.

Each is looked up here and nowhere else, and each has a test of its own in
`tests/policy/test_jax_versions.py`, which names the version of JAX that closed it.
"""

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import config, core, distributed, mesh, sharding_impls
from jax.extend import backend
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]


def coordination_client() -> Any:
    """The client of JAX's coordination service, with its key-value store; None in one process.

    Orbax reaches for it in the same way.
    """
    return distributed.global_state.client


def coordinator_host() -> str:
    """The host of the first process, as the others reach it; empty in one process."""
    address = distributed.global_state.coordinator_address or ""
    return address.rpartition(":")[0].strip("[]")


_FOR_EVER_S = 10_000_000
"""A time without a heartbeat after which JAX would abort the process: others look after that."""


def start_coordination_service(address: str, num_processes: int) -> Any:
    """Starts a coordination service for processes that another one looks after.

    It ends with the object, and aborts all processes that are connected to it then.

    Args:
        address: `host:port` where it listens, and nowhere else.
        num_processes: How many will join.
    """
    return _jax.get_distributed_runtime_service(
        address,
        num_processes,
        heartbeat_timeout=_FOR_EVER_S,
        shutdown_timeout=1,
    )


def connect_coordination_service(
    address: str, num_processes: int, process_id: int
) -> Callable[[], None]:
    """Connects to a service; returns when all processes have, be it never.

    There is no end to it, since JAX would abort the process then.

    Args:
        address: Of the service.
        num_processes: How many connect.
        process_id: Which of them this is.

    Returns:
        To be called in a process that belongs to no others, which belongs to these from then on.

    Raises:
        jax.errors.JaxRuntimeError: There is no service.
    """
    client = _jax.get_distributed_runtime_client(
        address,
        process_id,
        init_timeout=_FOR_EVER_S,
        heartbeat_timeout=_FOR_EVER_S,
        use_compression=True,
        shutdown_on_destruction=False,  # that would wait for those who have died
    )
    client.connect()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))  # without end: so would its own end

    def belong() -> None:
        state = distributed.global_state
        state.client, state.coordinator_address = client, address
        state.process_id, state.num_processes = process_id, num_processes

    return belong


def leave_runtime(keep: bool) -> None:
    """Forgets the other processes and all devices, so that others can be joined, with new ones.

    Arrays and programs that were there before can be used no more.

    Args:
        keep: Whether something still waits in the old runtime, which is never destroyed then: that
            would wait for it.
    """
    state = distributed.global_state
    if keep:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend.get_backend()))
    state.client, state.preemption_sync_manager = None, None
    state.process_id, state.num_processes, state.coordinator_address = 0, 1, None
    jax.clear_caches()
    backend.clear_backends()


def call_at_preemption_poll(callback: Callable[[], None]) -> bool:
    """Calls a function before this process asks JAX for the first time whether it is to end.

    Returns:
        Whether there is such a service.
    """
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


def compiler_options_of(lowered: jax.stages.Lowered) -> dict[str, Any]:
    """The `compiler_options` that `jax.jit` was given for a program, which it shows nowhere."""
    try:
        return dict(lowered._lowering._compiler_options_kvs)  # type: ignore[attr-defined]
    except AttributeError as error:
        raise RuntimeError(
            f"tpudist cannot read the compiler options of a program that jax {jax.__version__} has "
            "lowered, and would compile it differently than jax.jit does. Install a jax that "
            "tpudist supports: see CONTRIBUTING.md."
        ) from error


def make_key_of_trace_caches() -> Any:
    """A setting of our own, of which JAX's caches of traces know: another value, other caches.

    None where JAX has no such settings. To be made once: what was traced before is traced anew.
    """
    try:
        return config.config_ext.Config(
            "tpudist_trace", None, include_in_jit_key=False, include_in_trace_context=True
        )
    except (AttributeError, TypeError):
        return None


def settings_of_traces() -> tuple[Any, ...]:
    """The values of JAX's settings that change what a trace gives, such as `jax_enable_x64`.

    Empty where this JAX does not give them.
    """
    try:
        values = zip(config.trace_context_names(), config.trace_context(), strict=True)
        return tuple(value for name, value in values if name.startswith("jax_"))
    except (AttributeError, TypeError, ValueError):
        return ()


def is_described(device: jax.Device) -> bool:
    """Whether a device is one of a described topology, to compile for and not to run on."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


def make_evaluation(evaluate: Callable[[Any, Any, list[Any], dict[str, Any]], Any]) -> Any:
    """A trace of JAX that evaluates operations at once, as there is one by default, by `evaluate`.

    It is given the trace, the primitive, its arguments and its parameters. For `use_evaluation`.

    Raises:
        RuntimeError: This JAX has no such traces.
    """
    try:

        class Evaluation(core.EvalTrace):
            def process_primitive(self, primitive, tracers, params, /):
                return evaluate(self, primitive, tracers, params)

        return Evaluation()
    except (AttributeError, TypeError) as error:
        raise RuntimeError(
            "To run replica functions eagerly, tpudist evaluates the operations of JAX itself, but "
            f"jax {jax.__version__} does not allow that. Install a jax that tpudist supports: see "
            "CONTRIBUTING.md. Or do not use strategy.debug()."
        ) from error


def use_evaluation(evaluation: Any = None) -> contextlib.AbstractContextManager:
    """Evaluates operations by `evaluation` in this thread; without one, as JAX does by default."""
    return core.set_current_trace(core.eval_trace if evaluation is None else evaluation)


def name_axis(name: str, size: int) -> contextlib.AbstractContextManager:
    """Lets collectives over an axis of this name and size be asked for, in this thread."""
    return core.extend_axis_env_nd([(name, size)])


def name_axes(mesh: Any) -> contextlib.AbstractContextManager:
    """Lets collectives over the manual axes of an abstract mesh be asked for, in this thread."""
    return core.extend_axis_env_nd([(axis, mesh.shape[axis]) for axis in mesh.manual_axes])


@contextlib.contextmanager
def leave_axes() -> Iterator[None]:
    """Takes the names of all axes out of force in this thread, as outside of traces."""
    before = core.trace_ctx.axis_env
    core.trace_ctx.set_axis_env(core.top_axis_env)
    try:
        yield
    finally:
        core.trace_ctx.set_axis_env(before)


def leave_devices() -> contextlib.AbstractContextManager:
    """Takes the devices of `jax.set_mesh` out of force in this thread, during a trace as well.

    The abstract mesh stays. Where a function asks for a value while it is traced
    (`jax.ensure_compile_time_eval`), JAX computes on the devices in force, and fails there if an
    axis of the abstract mesh is Manual.
    """
    return sharding_impls._internal_use_concrete_mesh(mesh.empty_concrete_mesh)


def place_explicitly() -> contextlib.AbstractContextManager:
    """Lets `jax.transfer_guard` treat transfers in this thread as those of `jax.device_put`."""
    return config.explicit_device_put_scope()


def settings_of_thread() -> list[tuple[Any, Any]]:
    """What context managers of JAX have set in this thread, for `set_in_thread`; traces as well."""
    found = {id(x): x for x in config.config_states.values()}
    for module in (config, core, mesh):
        found |= {
            id(x): x for x in vars(module).values() if isinstance(x, config.config_ext.Config)
        }
    return [(x, x.get_local()) for x in found.values()]


def set_in_thread(settings: list[tuple[Any, Any]]) -> None:
    """Sets in this thread what `settings_of_thread` has found, here or in another one."""
    for setting, value in settings:
        if setting.get_local() is not value:
            setting.set_local(value)
            update = getattr(setting, "_update_thread_local_hook", None)
            if update is not None:
                update(None if value is config.config_ext.unset else value)


def wrap_function(module: str, name: str, wrap: Callable[[Any], Any]) -> bool:
    """Puts `wrap(function)` in the place of a function of JAX, for all modules of JAX.

    Those that hold it otherwise (as a default argument, within what decorates it) keep the old one.

    Args:
        module: Where it is defined, below `jax._src`.
        name: Its name there.
        wrap: Gives what is to be called instead.

    Returns:
        Whether this JAX has such a function.
    """
    try:
        function = vars(importlib.import_module(f"jax._src.{module}"))[name]
    except (ImportError, KeyError):
        return False
    instead = functools.wraps(function)(wrap(function))
    for known, loaded in list(sys.modules.items()):
        if known.startswith("jax.") and vars(loaded).get(name) is function:
            setattr(loaded, name, instead)
    return True


def wrap_operation(module: str, name: str, wrap: Callable[[Any], Any]) -> bool:
    """Puts `wrap(bind)` in the place of how an operation of JAX is asked for, wherever it is.

    Args:
        module: Where the primitive is defined, below `jax._src`.
        name: Its name there.
        wrap: Gives what is to be called instead, with the operands and the parameters.

    Returns:
        Whether this JAX has such an operation.
    """
    try:
        primitive = vars(importlib.import_module(f"jax._src.{module}"))[name]
        primitive.bind = wrap(primitive.bind)
    except (ImportError, KeyError, AttributeError):
        return False
    return True
