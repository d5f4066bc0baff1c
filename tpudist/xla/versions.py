"""Which versions of the compiler's packages are installed, and whose libtpu compiles."""

import importlib.metadata
import importlib.util
import os
import pathlib


def version_of(package: str) -> str:
    """The version of an installed package; "" if no installer has put it there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def users_libtpu() -> pathlib.Path | None:
    """The libtpu.so of the user's own that TPU_LIBRARY_PATH selects; None for the installed one.

    JAX sets the variable too, to the installed one.
    """
    library = os.environ.get("TPU_LIBRARY_PATH")
    package = importlib.util.find_spec("libtpu")
    folder = pathlib.Path(package.origin).parent if package and package.origin else None
    return pathlib.Path(library) if library and pathlib.Path(library).parent != folder else None
