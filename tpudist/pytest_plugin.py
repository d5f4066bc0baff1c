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

`--tpudist-update-ledger` writes the ledgers of `tpudist.testing.assert_collectives` anew.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import jax

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
        help="let tpudist.testing write its ledgers anew, rather than compare with them",
    )
    parser.addini(SETTING, "number of devices to emulate; without it, the real ones are used")


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
            f"{error} Under pytest it is a conftest.py or a plugin that does so when it is "
            f"imported: let it do that in a fixture."
        ) from error


@pytest.fixture(scope="session")
def emulated_devices(request: pytest.FixtureRequest) -> list[jax.Device]:
    """The devices that are emulated, in the order of their ids.

    Raises:
        pytest.UsageError: No number of devices was given.
    """
    if _num_devices(request.config) is None:
        raise pytest.UsageError(
            f"The fixture emulated_devices was asked for, but not how many devices: set "
            f"{SETTING} = 8 under [tool.pytest.ini_options], or call pytest {OPTION} 8."
        )
    import jax

    return jax.local_devices()


def _num_devices(config: pytest.Config) -> int | None:
    """The number on the command line, or else that of the setting."""
    option, setting = config.getoption(OPTION), config.getini(SETTING)
    if option is not None or not setting:
        return option
    try:
        return int(setting)
    except ValueError:
        raise pytest.UsageError(
            f"{SETTING} = {setting}: not a number of devices. Give a whole one, such as 8."
        ) from None
