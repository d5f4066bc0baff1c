"""Versions of the installed packages, for `tpudist --version` and reports; imports none of them."""

from __future__ import annotations

import importlib.metadata
import platform

PACKAGES = (
    "tpudist",
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "grain",
    "keras",
    "ray",
)


def find_versions() -> dict[str, str]:
    """Returns the versions of the installed packages of `PACKAGES`, of Python and of the system."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["Python"] = platform.python_version()
    found["system"] = f"{platform.system()} {platform.machine()}"
    return found


def format_versions() -> str:
    """Returns the versions on one line, as `tpudist --version` prints them."""
    return ", ".join(f"{name} {version}" for name, version in find_versions().items())
