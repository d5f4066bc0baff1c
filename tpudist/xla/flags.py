"""What compilers read from the environment, beside the options that they are given.

XLA and libtpu read it once in a process. What is compiled in another process is compiled with the
variables of the moment; what is compiled in this one, with those of when it began.
"""

import functools
import hashlib
import os
from collections.abc import Mapping

from jaxlib import xla_client

_COMPILERS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_PREFIXES = ("JAX_", "LIBTPU_", "TPU_", "XLA_")


def now() -> dict[str, str | None]:
    """What the compiler of a process that is started now reads."""
    return {name: os.environ.get(name) for name in _COMPILERS}


@functools.cache
def of_this_process() -> dict[str, str | None]:
    """What the compilers of this process have read.

    XLA itself is asked for its flags. libtpu cannot be: its arguments are those of the first call.
    """
    options = xla_client.CompileOptions().SerializeAsString()
    return now() | {"XLA_FLAGS": hashlib.sha256(options).hexdigest()}


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables in `environment` that JAX, XLA or libtpu may read."""
    return {name: value for name, value in environment.items() if name.startswith(_PREFIXES)}
