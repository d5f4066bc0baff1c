"""What compilers read from the environment, and from JAX's settings, beside a program's options.

XLA and libtpu read the environment once in a process. What is compiled in another process is
compiled with the variables of the moment; what is compiled in this one, with those of when it
began.
"""

import functools
import hashlib
import os
from collections.abc import Mapping
from typing import Any

from jaxlib import xla_client

from tpudist.xla.settings import Setting

_COMPILERS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_PREFIXES = ("JAX_", "LIBTPU_", "TPU_", "XLA_")
# Options that are attributes of XLA's build options, and no overrides of its debug options.
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
    """What the compiler of a process that is started now reads."""
    return {name: os.environ.get(name) for name in _COMPILERS}


@functools.cache
def process_flags() -> dict[str, str | None]:
    """What the compilers of this process have read.

    XLA itself is asked for its flags. libtpu cannot be: its arguments are those of the first call.
    """
    options = xla_client.CompileOptions().SerializeAsString()
    return read_flags() | {"XLA_FLAGS": hashlib.sha256(options).hexdigest()}


def jit_options() -> dict[str, Any]:
    """The options that `jax.jit` gives every program, from JAX's settings of the moment."""
    options: dict[str, Any] = {
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
    """The variables in `environment` that JAX, XLA or libtpu may read."""
    return {name: value for name, value in environment.items() if name.startswith(_PREFIXES)}
