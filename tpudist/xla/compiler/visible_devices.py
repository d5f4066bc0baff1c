"""Makes `jax.devices` and related functions report other devices to the code that runs in a block.

A step may ask JAX for the number of devices, or for the platform ("use the kernel on a TPU"). While
it is traced for a slice, it must see the slice, or the plan would be of another program.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax

from tpudist.xla import internals

_Devices = tuple[jax.Device, ...]
# Of this thread: other threads, for example those of the input, see the devices of the process.
_shown: ContextVar[_Devices | None] = ContextVar("devices that JAX reports", default=None)
_ANSWERS: dict[str, Callable[[_Devices], Any]] = {
    "devices": list,
    "local_devices": list,
    "device_count": len,
    "local_device_count": len,
    "default_backend": lambda devices: devices[0].platform,
}
# What JAX raises, depending on whether it compiles a program or moves an array first.
_SIGNS = ("'local_devices'", "compile-only client", "not addressable")


def means_absent_devices(error: Exception) -> bool:
    """Returns whether JAX raises such an error if a program uses devices that only describe."""
    return any(text in str(error) for text in _SIGNS)


@contextlib.contextmanager
def show_devices(devices: Sequence[jax.Device]) -> Iterator[None]:
    """Makes JAX report `devices` to this thread, as if one process had them.

    Also `jax.make_mesh` and `jax.pmap` use them. Questions about another platform, such as
    `jax.devices("cpu")`, are answered as before.
    """
    _install()
    token = _shown.set(tuple(devices))
    try:
        yield
    finally:
        _shown.reset(token)


@functools.cache
def _install() -> None:
    """Replaces the functions, for the rest of the process: without a block they do not change."""
    # Replacing them in each block instead would not be safe: blocks of two threads may overlap.
    for name, answer in _ANSWERS.items():
        setattr(jax, name, _replace(vars(jax)[name], answer))
    jax.process_count = _hide(jax.process_count)
    internals.replace_devices(lambda plain: _replace(plain, list), _hide)
    internals.replace_backend(lambda: (shown := _shown.get()) and shown[0].client)


def _replace(plain: Callable[..., Any], answer: Callable[[_Devices], Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def ask(*args, **kwargs):
        shown = _shown.get()
        platforms = {x for x in (*args, *kwargs.values()) if isinstance(x, str)}
        if shown is None or platforms - {shown[0].platform}:
            return plain(*args, **kwargs)
        return answer(shown)

    return ask


def _hide(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that finds the devices of the process also in a block."""

    @functools.wraps(plain)
    def ask(*args, **kwargs):
        token = _shown.set(None)
        try:
            return plain(*args, **kwargs)
        finally:
            _shown.reset(token)

    return ask
