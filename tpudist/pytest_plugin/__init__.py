"""Gives a test suite emulated devices: one CPU process with several, as if it ran on a slice.

A project asks for them in its pyproject.toml,

    [tool.pytest.ini_options]
    addopts = "-p tpudist.pytest_plugin"
    tpudist_devices = 8

or on the command line, which wins: `pytest -p tpudist.pytest_plugin --tpudist-devices 4`. They are
there before the first test module is imported, since a process chooses its devices only once. All
of `jax.devices()` are then emulated; a test may ask for them by the fixture `emulated_devices`.

Not an entry point of pytest's: those are imported in every project of an environment, and importing
JAX takes seconds. With the plugin but without a number nothing happens.

The fixture `tpudist_pod` starts a program of yours as several real processes, and lets faults
happen to them.

`--tpudist-update-ledger` writes the ledgers of `tpudist.testing.assert_collectives` anew.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tpudist.pytest_plugin import isolated_hosts
from tpudist.pytest_plugin.fault import Fault, draw_faults
from tpudist.pytest_plugin.pod import Ended, Pod, PodError

if TYPE_CHECKING:
    import jax

__all__ = ["Ended", "Fault", "Pod", "PodError", "draw_faults", "emulated_devices", "tpudist_pod"]

OPTION = "--tpudist-devices"
SETTING = "tpudist_devices"
UPDATE_OPTION = "--tpudist-update-ledger"
UPDATE_VARIABLE = "TPUDIST_UPDATE_LEDGER"  # as testing/ledger.py, which would import JAX


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option and the setting."""
    parser.getgroup("tpudist").addoption(
        OPTION, type=int, metavar="N", help=f"emulate N devices; overrides the setting {SETTING}"
    )
    parser.getgroup("tpudist").addoption(
        UPDATE_OPTION,
        action="store_true",
        help="write the ledgers of tpudist.testing instead of comparing with them",
    )
    parser.addini(SETTING, "number of devices to emulate (default: use the real devices)")


def pytest_configure(config: pytest.Config) -> None:
    """Starts the emulation that was asked for.

    Raises:
        pytest.UsageError: The number is none, or JAX has devices already.
    """
    if config.getoption(UPDATE_OPTION):
        os.environ[UPDATE_VARIABLE] = "1"  # also in the processes of pytest-xdist
    asked = _num_devices(config)
    if asked is None:
        return
    import tpudist

    try:
        tpudist.emulate(asked)
    except ValueError as error:
        raise pytest.UsageError(f"{OPTION} or {SETTING}: {error}") from error
    except RuntimeError as error:
        raise pytest.UsageError(
            f"{error} Under pytest, a conftest.py or a plugin does this when it is imported. Do "
            f"it in a fixture instead."
        ) from error


@pytest.fixture(scope="session")
def emulated_devices(request: pytest.FixtureRequest) -> list[jax.Device]:
    """The devices that are emulated, in the order of their ids.

    Raises:
        pytest.UsageError: No number of devices was given.
    """
    if _num_devices(request.config) is None:
        raise pytest.UsageError(
            f"The fixture emulated_devices needs a number of devices: set {SETTING} = 8 under "
            f"[tool.pytest.ini_options], or call pytest {OPTION} 8."
        )
    import jax

    return jax.local_devices()


@pytest.fixture
def tpudist_pod() -> Iterator[Callable[..., Pod]]:
    """Starts a program as several processes: `tpudist_pod("train.py", num_processes=2)`.

    Takes what `Pod` takes; with `separate_hosts=True` the processes are on two hosts with a cable
    that can be unplugged (network namespaces: Linux, and root; the test is skipped elsewhere).

        def test_it_says_why(tpudist_pod):
            faults = [Fault("raise", process=1, at_call=3)]
            with tpudist_pod("train.py", "--steps", "50", faults=faults) as pod:
                ended = pod.wait(timeout_s=60)
            assert [x.exit_code for x in ended] == [1, 1]

    Nothing is left running after the block, nor after the test.
    """
    with contextlib.ExitStack() as stack:

        def start(program: Any, *args: str, separate_hosts: bool = False, **options: Any) -> Pod:
            if separate_hosts:
                if why := isolated_hosts.why_not():
                    pytest.skip(f"tpudist_pod(separate_hosts=True): {why}")
                options["hosts"] = stack.enter_context(isolated_hosts.make_isolated_hosts())
            pod = Pod(program, *args, **options)
            stack.callback(functools.partial(pod.__exit__, None, None, None))
            return pod

        yield start


def _num_devices(config: pytest.Config) -> int | None:
    """The number on the command line, or else that of the setting."""
    option, setting = config.getoption(OPTION), config.getini(SETTING)
    if option is not None or not setting:
        return option
    try:
        return int(setting)
    except ValueError:
        raise pytest.UsageError(
            f"{SETTING} = {setting}: not a number of devices. Use a whole number, such as 8."
        ) from None
