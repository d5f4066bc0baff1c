"""Bypasses JAX's persistent compilation cache."""

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
    """Compiles without JAX's persistent cache, in all threads while any thread is inside.

    For a program from the cache, the compiler does not run and writes no reports.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _num_inside, _was_enabled
    # The setting belongs to the process. So the first thread to enter disables the cache, and the
    # last thread to leave restores the setting.
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
    # JAX reads the setting at its first compile and keeps the answer until a reset.
    compilation_cache.reset_cache()
