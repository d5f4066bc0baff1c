"""The suite scale: costs that must not grow faster than the work, one module `scale_*` for each."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure


def figures() -> Iterator[Figure]:
    """The figures of all modules."""
    for name in module_names():
        yield from importlib.import_module(f"benchmarks.{name}").figures()


def module_names() -> list[str]:
    """Names of the modules of this folder that begin with `scale_`."""
    names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return [name for name in names if name.startswith("scale_")]
