"""Finds the versions of installed packages, and the libtpu that compiles."""

import importlib.metadata
import importlib.util
import os
import pathlib


def version_of(package: str) -> str:
    """Returns the version of an installed package; "" if no installer has installed it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def users_libtpu() -> pathlib.Path | None:
    """Returns the user's libtpu.so from TPU_LIBRARY_PATH; None if the installed one is used."""
    # JAX sets the variable to the installed library, which does not count.
    library = os.environ.get("TPU_LIBRARY_PATH")
    package = importlib.util.find_spec("libtpu")
    folder = pathlib.Path(package.origin).parent if package and package.origin else None
    return pathlib.Path(library) if library and pathlib.Path(library).parent != folder else None
