"""What all tests share. The devices are emulated by tpudist's own plugin (see pyproject.toml)."""

import importlib.util
import os
import zlib

import hypothesis
import jax
import pytest

# Tests compile much and compute little: without LLVM's optimizations XLA:CPU compiles in half the
# time. Collectives and what libtpu makes of a program stay as they are. The variable is for the
# processes that tests start; this one has imported JAX already, with the plugin.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)

# Keras asks at its import, and is imported by a scope's program only.
os.environ.setdefault("KERAS_BACKEND", "jax")

# No deadline: the first example of a property compiles a program. In CI the same examples each
# time, so that a failure there is one of the change; others are found on developers' machines.
hypothesis.settings.register_profile("tpudist", deadline=None, derandomize=bool(os.getenv("CI")))
hypothesis.settings.load_profile("tpudist")


# A worker emulates 8 devices and holds 2 to 3 GB; more of them than this gain little.
_MOST_WORKERS = 4
# Tests that watch the clock, or whose processes do: beside each other they would be late.
_WATCH_THE_CLOCK = (
    "test_child test_coordination test_coordinator_faults test_device_check test_engine_contract "
    "test_exact_resume "
    "test_input_ends test_input_processes test_launch_hosts test_pod_in_a_box test_preemption "
    "test_preemption_processes test_prefetch test_process_guard test_processes test_ray_engine "
    "test_server test_server_storm test_survival test_train_script"
).split()
# The longest ones first, so that no worker is left with one of them at the end.
_LONGEST = ("test_geometry", "test_train_script", "test_no_cost", "test_plan", "test_layout_search")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--one-in`."""
    text = "of each test's parameters the first and about one in N; the same each time"
    parser.addoption("--one-in", type=int, default=1, metavar="N", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Refuses a share that is none."""
    if config.option.one_in < 1:
        raise pytest.UsageError(f"--one-in {config.option.one_in}: one in N, where N is 1 or more.")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers for the whole suite: one per core. A few files or tests run in this process."""
    if any("::" in x or x.endswith(".py") for x in config.args):
        return 0
    return min(os.cpu_count() or 1, _MOST_WORKERS)


def _in_groups(items: list[pytest.Item]) -> None:
    """Says which tests share a worker: those of one file, which share what they have compiled.

    Those that watch the clock are one group, so that they run one after the other.
    """
    for item in items:
        name = item.path.stem
        group = "the clock" if name in _WATCH_THE_CLOCK else name
        item.add_marker(pytest.mark.xdist_group(group))
    rank = {name: i for i, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def _skip_without_libtpu(items: list[pytest.Item]) -> None:
    """Skips the tests that ask the TPU compiler where it is not installed."""
    if importlib.util.find_spec("libtpu") is not None:
        return
    for item in items:
        if item.get_closest_marker("libtpu"):
            item.add_marker(pytest.mark.skip(reason="libtpu is not installed"))


def _sample(items: list[pytest.Item], is_chosen: dict[pytest.Item, bool]) -> list[bool]:
    """Which are the first of their parameters, chosen, or notebooks."""
    first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}.values()
    kept = set(first) | {item for item in items if item.get_closest_marker("notebook")}
    return [item in kept or is_chosen[item] for item in items]


def _leave_out(config: pytest.Config, items: list[pytest.Item], keeps: list[bool]) -> None:
    left_out = [item for item, keep in zip(items, keeps, strict=True) if not keep]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item, keep in zip(items, keeps, strict=True) if keep]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """Groups the tests, and leaves out those that are not asked for."""
    _in_groups(items)
    _skip_without_libtpu(items)
    if "parity" not in config.option.markexpr:
        _leave_out(config, items, [item.get_closest_marker("parity") is None for item in items])
    # By its name as it is before pytest-xdist adds the group, so that any number of workers has
    # the same; the first of those that `-m` and `-k` leave, so that no test is left out.
    one_in = config.option.one_in
    is_chosen = {item: zlib.crc32(item.nodeid.encode()) % one_in == 0 for item in items}
    result = yield
    _leave_out(config, items, _sample(items, is_chosen))
    return result


@pytest.fixture(scope="session")
def needs_ray():
    """Skips where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")


@pytest.fixture(scope="module")
def running_ray(needs_ray):
    """An engine that has started Ray, which others use as they would use that of a program.

    Once for the tests of a file, since it takes seconds to start.
    """
    from tpudist.engine.ray.ray_engine import RayEngine

    engine = RayEngine()
    engine.start()
    yield engine
    engine.shutdown()
