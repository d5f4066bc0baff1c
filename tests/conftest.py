"""Fixtures and options of all tests. The plugin of tpudist emulates the devices."""

import collections
import gc
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import hypothesis
import jax
import pytest

import kept_programs

# Tests compile much and compute little: without LLVM's optimizations XLA:CPU compiles in half the
# time. Collectives and what libtpu makes of a program stay as they are. The variable is for the
# processes that tests start; this one has imported JAX already, with the plugin.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)

# Tests start hundreds of Python processes. Without bytecode on disk, each compiles tpudist again,
# and pytest rewrites each file of tests in each run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Keras asks at its import, and is imported by a scope's program only.
os.environ.setdefault("KERAS_BACKEND", "jax")

# If the folder of compiled programs has more files than this, a run deletes them when it starts.
_MOST_PROGRAMS = 40_000

# No deadline: the first example of a property compiles a program.
hypothesis.settings.register_profile("tpudist", deadline=None)
hypothesis.settings.load_profile("tpudist")

# A worker emulates 8 devices and holds 2 to 3 GB; more of them than this gain little.
_MOST_WORKERS = 4
# Tests that depend on the clock, or whose processes do: in parallel they would be late.
_WATCH_THE_CLOCK = (
    "test_child test_coordination test_coordinator_faults test_device_check test_engine_contract "
    "test_exact_resume test_forgotten_coordinator "
    "test_input_ends test_input_processes test_launch_hosts test_pod_in_a_box test_preemption "
    "test_preemption_processes test_prefetch test_process_guard test_processes test_ray_engine "
    "test_server test_server_storm test_survival test_train_script"
).split()
# The longest ones first, so that no worker is left with one of them at the end.
_LONGEST = ("test_geometry", "test_train_script", "test_no_cost", "test_plan", "test_layout_search")

# A run of the whole suite runs one share of the slow tests. `exhaustive` tests count as slow.
_NUM_SHARES = 12


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--share`."""
    parser.addoption(
        "--share",
        metavar="N",
        help=f"which of {_NUM_SHARES} shares of the slow and exhaustive tests runs, from 0, or "
        f"'all'; +K counts from the share that the commit chooses. By default the commit's share "
        f"runs, or all with -m '' or if you select tests by -m, -k, files or folders",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist sends the options to workers
def pytest_configure(config: pytest.Config) -> None:
    """Chooses the share of the slow and exhaustive tests, and the seed of random examples."""
    commit = _read_commit(config.rootpath)
    if config.option.share is None:
        config.option.share = "all" if _asks_for_all(config) else "+0"
    if re.fullmatch(r"\+\d+", config.option.share):
        config.option.share = str((int(commit, 16) + int(config.option.share)) % _NUM_SHARES)
    if config.option.share not in ("all", *map(str, range(_NUM_SHARES))):
        raise pytest.UsageError(
            f"--share {config.option.share}: must be 'all', a number from 0 to {_NUM_SHARES - 1}, "
            f"or such as +3, which counts from the commit's share."
        )
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = int(commit[:8], 16)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Shares compiled programs with the other workers and with later runs.

    `--cache-clear` deletes them.
    """
    config = session.config
    if not config.pluginmanager.has_plugin("cacheprovider"):
        return
    folder = config.cache.mkdir("programs")
    if not hasattr(config, "workerinput") and len(os.listdir(folder)) > _MOST_PROGRAMS:
        for file in folder.iterdir():  # another run may use the folder
            file.unlink(missing_ok=True)
    kept_programs.keep_programs(folder)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # fixtures of modules included
def pytest_runtest_protocol(item: pytest.Item):
    """Disables sharing for tests of libtpu: JAX cannot load programs for described TPUs."""
    if item.get_closest_marker("libtpu") is None:
        return (yield)
    with kept_programs.jax_keeps_nothing():
        return (yield)


def pytest_report_header(config: pytest.Config) -> str:
    """Reports what differs between runs, and how to repeat it."""
    share, seed = config.option.share, config.option.hypothesis_seed
    which = "all" if share == "all" else f"share {share} of 0 to {_NUM_SHARES - 1}"
    return (
        f"slow and exhaustive tests: {which}; repeat with --share={share} --hypothesis-seed={seed}"
    )


def _asks_for_all(config: pytest.Config) -> bool:
    """Whether tests are selected by a marker, a name, a file or a folder, or `-m ""` is given."""
    if config.option.markexpr or config.option.keyword:
        return True
    arguments = [str(x) for x in config.invocation_params.args]
    empty_expression = ("-m", "") in itertools.pairwise(arguments) or "-m=" in arguments
    return empty_expression or config.args_source is pytest.Config.ArgsSource.ARGS


def _read_commit(root: Path) -> str:
    """The commit that is checked out, as hexadecimal digits; zeros outside of a clone."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "0" * 40
    return found.stdout.strip()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers for the whole suite: one more than cores, since many tests wait for processes.

    A few files or tests run in this process.
    """
    if any("::" in x or x.endswith(".py") for x in config.args):
        return 0
    return min((os.cpu_count() or 1) + 1, _MOST_WORKERS)


def _group_of(nodeid: str) -> str:
    """Returns the name of the tests that share a worker with this one: those of its file.

    They share what they have compiled. Tests that watch the clock run one after the other.
    """
    name = Path(nodeid.partition("::")[0]).stem
    if name in _WATCH_THE_CLOCK:
        return "the clock"
    return "the layers" if name in ("test_layers", "test_layering") else name  # share trees


def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Gives each worker groups of tests: groups of pytest-xdist do nothing with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(nodeid)

    return ByGroup(config, log)


def _skip_without_libtpu(items: list[pytest.Item]) -> None:
    """Skips the tests that ask the TPU compiler where it is not installed."""
    if importlib.util.find_spec("libtpu") is not None:
        return
    for item in items:
        if item.get_closest_marker("libtpu"):
            item.add_marker(pytest.mark.skip(reason="libtpu is not installed"))


def _choose_share(items: list[pytest.Item], share: int) -> set[pytest.Item]:
    """Returns the tests of a share. The cases of one function are in different shares."""
    functions: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    chosen = set()
    for item in items:
        if item.get_closest_marker("slow"):
            functions[item.nodeid.partition("[")[0]].append(item)
        else:
            chosen.add(item)
    for name, cases in functions.items():
        first = (share + zlib.crc32(name.encode())) % _NUM_SHARES  # functions begin anywhere
        chosen |= set(cases[first::_NUM_SHARES])
    return chosen


def _leave_out(config: pytest.Config, items: list[pytest.Item], keeps: list[bool]) -> None:
    left_out = [item for item, keep in zip(items, keeps, strict=True) if not keep]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item, keep in zip(items, keeps, strict=True) if keep]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """Sorts the tests, and deselects the tests that the options do not select."""
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)
    rank = {name: i for i, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(_group_of(item.nodeid), len(rank)))
    _skip_without_libtpu(items)
    if "parity" not in config.option.markexpr:
        _leave_out(config, items, [item.get_closest_marker("parity") is None for item in items])
    if config.option.share != "all":
        in_share = _choose_share(items, int(config.option.share))
        _leave_out(config, items, [item in in_share for item in items])
    return (yield)


@pytest.fixture(scope="module", autouse=True)
def _forget_older_objects():
    """Collects what the last file left, and lets later collections skip all that lives on.

    A worker holds millions of objects late in a run, which `gc.collect()` takes seconds to visit.
    """
    gc.collect()
    gc.freeze()


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
