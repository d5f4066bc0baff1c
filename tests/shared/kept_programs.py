"""JAX's persistent compilation cache in a folder, for tests of what it keeps and gives again."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def jax_keeps_programs(folder: Path) -> Iterator[dict[str, str | int]]:
    """Lets JAX keep every program in `folder` for as long; gives the settings that say so."""
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
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
