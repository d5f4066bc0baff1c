"""Reads the compiler settings from the environment and from JAX's configuration.

XLA and libtpu read the environment once per process. So a compiler in a new process uses the
current variables, and the compiler in this process those from its start.
"""

import functools
import hashlib
import os
from collections.abc import Mapping

from jaxlib import xla_client

from tpudist.xla.settings import Setting

_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_PREFIXES = ("JAX_", "LIBTPU_", "TPU_", "XLA_")
# Options that are attributes of XLA's build options. All others override debug options.
_EFFORTS = {
    "exec_time_optimization_effort": Setting.EXEC_TIME_OPTIMIZATION_EFFORT,
    "memory_fitting_effort": Setting.MEMORY_FITTING_EFFORT,
}
_LEVELS = {
    "optimization_level": Setting.OPTIMIZATION_LEVEL,
    "memory_fitting_level": Setting.MEMORY_FITTING_LEVEL,
}
BUILD_OPTIONS = (*_EFFORTS, *_LEVELS)
_NUMBER_OF_LEVEL = {"UNKNOWN": 0, "O0": 9, "O1": 19, "O2": 29, "O3": 39}  # XLA's EffortLevel


def read_flags() -> dict[str, str | None]:
    """Returns the flags that the compiler of a new process would read."""
    return {name: os.environ.get(name) for name in _FLAG_VARIABLES}


@functools.cache
def process_flags() -> dict[str, str | None]:
    """Returns the flags that the compilers of this process have read, with a digest for XLA's."""
    # New options of XLA contain its flags. libtpu offers nothing like that, so its arguments are
    # read at the first call of this function and cached.
    options = xla_client.CompileOptions().SerializeAsString()
    return read_flags() | {"XLA_FLAGS": hashlib.sha256(options).hexdigest()}


def jit_options() -> dict[str, bool | int | float | str]:
    """Returns the compiler options that `jax.jit` derives from JAX's current settings."""
    options: dict[str, bool | int | float | str] = {
        name: setting.read() for name, setting in _EFFORTS.items() if setting.is_known
    }
    for name, setting in _LEVELS.items():
        options[name] = _NUMBER_OF_LEVEL[setting.read()]
    if Setting.DISABLE_MOST_OPTIMIZATIONS.read():
        options["xla_backend_optimization_level"] = 0
        options["xla_llvm_disable_expensive_passes"] = True
    if not Setting.COMPILER_ENABLE_REMAT_PASS.read():
        options["xla_disable_hlo_passes"] = "rematerialization"
    return options


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables in `environment` that JAX, XLA or libtpu may read."""
    return {name: value for name, value in environment.items() if name.startswith(_PREFIXES)}
