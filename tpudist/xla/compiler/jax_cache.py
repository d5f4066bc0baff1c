"""JAX's persistent compilation cache, and how to ask the compiler itself."""

import contextlib
import threading
from collections.abc import Iterator

from jax.experimental.compilation_cache import compilation_cache

from tpudist.xla.settings import Setting

_lock = threading.Lock()
_num_inside = 0
_was_enabled = True


@contextlib.contextmanager
def bypass() -> Iterator[None]:
    """Compiles without JAX's persistent cache, in all threads for as long as one is inside.

    A program that comes from it was not compiled: the compiler has nothing to say of it.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _num_inside, _was_enabled
    # The first one in turns it off, the last one out on again: the setting is the process's.
    with _lock:
        if not _num_inside:
            _was_enabled = bool(Setting.ENABLE_COMPILATION_CACHE.read())
            _enable(False)
        _num_inside += 1


def _leave() -> None:
    global _num_inside
    with _lock:
        _num_inside -= 1
        if not _num_inside:
            _enable(_was_enabled)


def _enable(enabled: bool) -> None:
    Setting.ENABLE_COMPILATION_CACHE.set(enabled)
    compilation_cache.reset_cache()  # or JAX goes by what it found at its first compile
