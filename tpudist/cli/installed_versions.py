"""Versions of the installed packages, for `tpudist --version` and reports, without imports."""

from __future__ import annotations

import importlib.metadata
import platform

# Names on the package index, not of modules. A package is listed if its version decides whether a
# program compiles or what it computes.
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
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["Python"] = platform.python_version()
    versions["system"] = f"{platform.system()} {platform.machine()}"
    return versions


def format_versions() -> str:
    """Returns the versions on one line, as `tpudist --version` prints them."""
    return ", ".join(f"{name} {version}" for name, version in find_versions().items())
