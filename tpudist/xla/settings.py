"""JAX's settings: the one place that knows their names.

JAX loses and gains settings between versions, and `jax.config.jax_something` of a lost one is an
AttributeError in the midst of a run. Everything that tpudist reads or sets goes by `Setting` here,
which says what holds where JAX has none of that name. `tests/policy/test_jax_versions.py` asks for
each of them, and names the version that lost one.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any

import jax

# What JAX reads from the environment without a setting of that name (jax 0.10 to 0.12).
_VARIABLES = """
JAX_COORDINATOR_ADDRESS JAX_COORDINATOR_BIND_ADDRESS JAX_COORDINATOR_PORT JAX_DUMP_IR_MODES
JAX_DUMP_IR_TO JAX_FORCE_TPU_INIT JAX_LOCAL_DEVICE_IDS JAX_PARTITION_INDEX JAX_PLATFORM_NAME
JAX_SLICE_INDEX
""".split()
# Parts of the names of settings that JAX makes when they are first used.
_LATER = ("MOSAIC", "MTLS", "PALLAS", "TRITON")


def is_variable_of_jax(name: str) -> bool:
    """Whether this JAX reads an environment variable `JAX_...`, as far as can be said."""
    is_setting = name.lower() in jax.config.values
    return is_setting or name in _VARIABLES or any(x in name for x in _LATER)


class Setting(enum.Enum):
    """A setting of JAX that tpudist reads or sets: its name, and what holds where it is gone."""

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
    # Gone since jax 0.11.1, with what they told the compiler.
    EXEC_TIME_OPTIMIZATION_EFFORT = "jax_exec_time_optimization_effort", 0.0
    MEMORY_FITTING_EFFORT = "jax_memory_fitting_effort", 0.0

    @property
    def jax_name(self) -> str:
        """What JAX calls it: `jax_platforms`."""
        return self.value[0]

    @property
    def is_known(self) -> bool:
        """Whether this JAX has it."""
        return self.jax_name in jax.config.values

    def read(self) -> Any:
        """What it is; where this JAX does not have it, what holds there."""
        if hasattr(jax.config, self.jax_name):  # what a context manager says, in this thread
            return getattr(jax.config, self.jax_name)
        return jax.config.read(self.jax_name) if self.is_known else self.value[1]

    def make_reader(self) -> Callable[[], Any]:
        """What reads it quickly, for one that is asked for at each step."""
        return functools.partial(getattr, jax.config, self.jax_name, self.value[1])

    def set(self, value: Any) -> None:
        """Changes it, for the whole process.

        Raises:
            RuntimeError: It is too late for it, or this JAX does not have it.
        """
        if not self.is_known:
            raise RuntimeError(
                f"Setting {self.jax_name} = {value!r} does not exist in jax {jax.__version__}. "
                "Install a jax that tpudist supports: see CONTRIBUTING.md."
            )
        jax.config.update(self.jax_name, value)
