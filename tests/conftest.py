"""What all tests share. The devices are emulated by tpudist's own plugin (see pyproject.toml)."""

import os

import hypothesis
import jax
import pytest

# Tests compile much and compute little: without LLVM's optimizations XLA:CPU compiles in half the
# time. Collectives and what libtpu makes of a program stay as they are. The variable is for the
# processes that tests start; this one has imported JAX already, with the plugin.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)

# No deadline: the first example of a property compiles a program. In CI the same examples each
# time, so that a failure there is one of the change; others are found on developers' machines.
hypothesis.settings.register_profile("tpudist", deadline=None, derandomize=bool(os.getenv("CI")))
hypothesis.settings.load_profile("tpudist")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that need TensorFlow itself, unless they are asked for."""
    if "parity" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("parity")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
