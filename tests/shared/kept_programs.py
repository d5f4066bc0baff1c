"""JAX's persistent compilation cache in a folder, for tests of what it keeps and gives again."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax._src import lru_cache
from jax.experimental.compilation_cache import compilation_cache


def keep_programs(folder: Path) -> None:
    """Lets JAX keep every program in `folder`, which several processes may share.

    JAX writes its files in place, so that another process may read half a program.
    """
    for name, value in _options(folder).items():
        jax.config.update(name, value)
    lru_cache.LRUCache.put = _put_whole


def _put_whole(cache: lru_cache.LRUCache, key: str, value: bytes) -> None:
    file = Path(cache.path) / f"{key}-cache"
    if file.exists():
        return
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as unfinished:
        unfinished.write(value)
    os.replace(unfinished.name, file)


def _options(folder: Path) -> dict[str, str | int]:
    return {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }


@contextlib.contextmanager
def jax_keeps_programs(folder: Path) -> Iterator[dict[str, str | int]]:
    """Lets JAX keep every program in `folder` for as long; gives the settings that say so."""
    options = _options(folder)
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
