"""Emulates devices for a test suite: one CPU process with several devices, like a slice.

Set the number of devices in your pyproject.toml,

    [tool.pytest.ini_options]
    addopts = "-p tpudist.pytest_plugin"
    tpudist_devices = 8

or on the command line, which overrides it: `pytest -p tpudist.pytest_plugin --tpudist-devices 4`.
The devices exist before the first test module is imported, because a process chooses its devices
only once. All of `jax.devices()` are then emulated; the fixture `emulated_devices` returns them.
Without a number, the plugin changes nothing.

The fixture `tpudist_pod` starts your program as several real processes and injects faults.

`--tpudist-update-ledger` writes the ledgers of `tpudist.testing.assert_collectives` again.
"""
# The plugin is not an entry point of pytest, because entry points are imported in every project of
# an environment, and importing JAX takes seconds.

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
# `testing.ledger.UPDATE`, whose module imports JAX.
UPDATE_VARIABLE = "TPUDIST_UPDATE_LEDGER"


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
    """Starts the emulation if a number of devices is set.

    Raises:
        pytest.UsageError: If the number is invalid, or JAX already has devices.
    """
    if config.getoption(UPDATE_OPTION):
        os.environ[UPDATE_VARIABLE] = "1"  # also in the processes of pytest-xdist
    num_devices = _num_devices(config)
    if num_devices is None:
        return
    import tpudist

    try:
        tpudist.emulate(num_devices)
    except ValueError as error:
        raise pytest.UsageError(f"{OPTION} or {SETTING}: {error}") from error
    except RuntimeError as error:
        raise pytest.UsageError(
            f"{error} Under pytest, a conftest.py or a plugin does this when it is imported. Do "
            f"it in a fixture instead."
        ) from error


@pytest.fixture(scope="session")
def emulated_devices(request: pytest.FixtureRequest) -> list[jax.Device]:
    """Returns the emulated devices in the order of their ids.

    Raises:
        pytest.UsageError: If no number of devices is set.
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

    Accepts the arguments of `Pod`. With `separate_hosts=True`, the processes are on two hosts with
    a cable that can be unplugged. This uses network namespaces, which need Linux and root; the test
    is skipped elsewhere.

        def test_it_says_why(tpudist_pod):
            faults = [Fault("raise", process=1, at_call=3)]
            with tpudist_pod("train.py", "--steps", "50", faults=faults) as pod:
                ended = pod.wait(timeout_s=60)
            assert [x.exit_code for x in ended] == [1, 1]

    All processes end with the block or, at the latest, with the test.
    """
    with contextlib.ExitStack() as stack:

        def start(
            program: str | os.PathLike[str],
            *args: str,
            separate_hosts: bool = False,
            **options: Any,
        ) -> Pod:
            if separate_hosts:
                if why := isolated_hosts.why_unsupported():
                    pytest.skip(f"tpudist_pod(separate_hosts=True): {why}")
                options["hosts"] = stack.enter_context(isolated_hosts.make_isolated_hosts())
            pod = Pod(program, *args, **options)
            # For a test without a `with` block; closing a pod twice does nothing.
            stack.callback(functools.partial(pod.__exit__, None, None, None))
            return pod

        yield start


def _num_devices(config: pytest.Config) -> int | None:
    """Returns the number on the command line, or else the number in the settings, or None."""
    option, setting = config.getoption(OPTION), config.getini(SETTING)
    # The option wins even if it is 0, which `emulate` rejects with a message.
    if option is not None or not setting:
        return option
    try:
        return int(setting)
    except ValueError:
        raise pytest.UsageError(
            f"{SETTING} = {setting}: not a number of devices. Use a whole number, such as 8."
        ) from None
