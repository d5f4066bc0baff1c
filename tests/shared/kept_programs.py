"""JAX's persistent compilation cache, for the whole test run and for tests of the cache."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import jax
from jax._src import lru_cache
from jax.experimental.compilation_cache import compilation_cache


def keep_programs(folder: Path) -> None:
    """Makes JAX save every program in `folder`, which several processes can share.

    JAX writes a file in place, so another process could read an incomplete program.
    """
    for name, value in _options(folder).items():
        jax.config.update(name, value)
    lru_cache.LRUCache.put = _put_whole


def _put_whole(cache: lru_cache.LRUCache, key: str, value: bytes) -> None:
    file = Path(cache.path) / f"{key}{lru_cache._CACHE_SUFFIX}"
    if file.exists():
        return
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as unfinished:
        unfinished.write(value)
    os.replace(unfinished.name, file)


def jax_keeps_programs(folder: Path) -> AbstractContextManager[dict[str, str | int | None]]:
    """Returns a context in which JAX saves every program in `folder`; it gives the settings."""
    return _settings(_options(folder))


def jax_keeps_nothing() -> AbstractContextManager[dict[str, str | int | None]]:
    """Returns a context in which JAX compiles every program, and neither saves nor loads any."""
    return _settings({"jax_compilation_cache_dir": None})


def _options(folder: Path) -> dict[str, str | int | None]:
    return {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }


@contextlib.contextmanager
def _settings(options: dict[str, str | int | None]) -> Iterator[dict[str, str | int | None]]:
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield options
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
