"""Reads and changes JAX's settings; the only module with their names.

JAX adds and removes settings between versions. `jax.config.jax_something` of a removed setting
would raise AttributeError during a run, so each `Setting` has a value for that case.
`tests/policy/test_jax_versions.py` reads each setting, and names the version that removed it.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any

import jax

from tpudist.xla import internals

# Environment variables that JAX reads without a setting of the same name (jax 0.10 to 0.12).
_VARIABLES = """
JAX_COORDINATOR_ADDRESS JAX_COORDINATOR_BIND_ADDRESS JAX_COORDINATOR_PORT JAX_DUMP_IR_MODES
JAX_DUMP_IR_TO JAX_FORCE_TPU_INIT JAX_LOCAL_DEVICE_IDS JAX_PARTITION_INDEX JAX_PLATFORM_NAME
JAX_SLICE_INDEX
""".split()
# Parts of the names of settings that JAX defines only at their first use.
_LATER = ("MOSAIC", "MTLS", "PALLAS", "TRITON")


def is_variable_of_jax(name: str) -> bool:
    """Whether this JAX reads an environment variable `JAX_...`, as far as we know."""
    is_setting = name.lower() in jax.config.values
    return is_setting or name in _VARIABLES or any(x in name for x in _LATER)


class Setting(enum.Enum):
    """A setting of JAX: its name, and the value to assume if this JAX does not have it."""

    PLATFORMS = "jax_platforms", None
    NUM_CPU_DEVICES = "jax_num_cpu_devices", -1
    DISABLE_JIT = "jax_disable_jit", False
    DEBUG_NANS = "jax_debug_nans", False
    DEBUG_INFS = "jax_debug_infs", False
    TRANSFER_GUARD_HOST_TO_DEVICE = "jax_transfer_guard_host_to_device", None
    ENABLE_X64 = "jax_enable_x64", False
    ENABLE_COMPILATION_CACHE = "jax_enable_compilation_cache", True
    COMPILATION_CACHE_DIR = "jax_compilation_cache_dir", None
    MIN_CACHED_COMPILE_TIME = "jax_persistent_cache_min_compile_time_secs", 1.0
    USE_SHARDY_PARTITIONER = "jax_use_shardy_partitioner", True
    DISABLE_MOST_OPTIMIZATIONS = "jax_disable_most_optimizations", False
    COMPILER_ENABLE_REMAT_PASS = "jax_compiler_enable_remat_pass", True
    OPTIMIZATION_LEVEL = "jax_optimization_level", "UNKNOWN"
    MEMORY_FITTING_LEVEL = "jax_memory_fitting_level", "UNKNOWN"
    # Removed in jax 0.11.1, together with the compiler options that they set.
    EXEC_TIME_OPTIMIZATION_EFFORT = "jax_exec_time_optimization_effort", 0.0
    MEMORY_FITTING_EFFORT = "jax_memory_fitting_effort", 0.0

    @property
    def jax_name(self) -> str:
        """Name in JAX, such as `jax_platforms`."""
        return self.value[0]

    @property
    def is_known(self) -> bool:
        """Whether this JAX has the setting."""
        return self.jax_name in jax.config.values

    def read(self) -> Any:
        """Returns the value; the default of `Setting` if this JAX does not have the setting."""
        # The attribute of JAX's config includes the value that a context manager has set in this
        # thread. Some settings have no attribute.
        try:
            return getattr(jax.config, self.jax_name)
        except AttributeError:
            return jax.config.read(self.jax_name) if self.is_known else self.value[1]

    def make_reader(self) -> Callable[[], Any]:
        """Returns a fast function that reads the setting, for use at each step."""
        state = internals.state_of_setting(self.jax_name)
        if state is not None:
            return functools.partial(getattr, state, "value")
        return functools.partial(getattr, jax.config, self.jax_name, self.value[1])

    def set(self, value: object) -> None:
        """Changes the setting for the whole process.

        Raises:
            RuntimeError: If it is too late for a change, or this JAX does not have the setting.
        """
        if not self.is_known:
            raise RuntimeError(
                f"Setting {self.jax_name} = {value!r} does not exist in jax {jax.__version__}. "
                "Install a jax that tpudist supports: see CONTRIBUTING.md."
            )
        jax.config.update(self.jax_name, value)
