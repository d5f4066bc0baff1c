"""The command `tpudist`: one module per subcommand, each with its `Options` and `run`.

Exit codes: 0 for yes (it fits), 1 for no, 2 for wrong use or if there is no answer, 130 after
Ctrl-C. `tpudist --version` prints the versions of tpudist and of its dependencies. Planning and
porting use no accelerator: JAX uses the CPU unless `JAX_PLATFORMS` names something else.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from tpudist.cli import (
    doctor_command,
    installed_versions,
    launch_command,
    plan_command,
    port_command,
    run_command,
    topologies_command,
)
from tpudist.cli.console import say, write
from tpudist.cli.errors import WrongUse
from tpudist.xla.settings import Setting

WRONG_USE = 2
INTERRUPTED = 130
COMMANDS = {
    "plan": plan_command,
    "topologies": topologies_command,
    "run": run_command,
    "launch": launch_command,
    "doctor": doctor_command,
    "port": port_command,
}


def main(args: Sequence[str] | None = None) -> int:
    """Reads the command line (or `args`) and runs it; returns the exit code."""
    args = sys.argv[1:] if args is None else list(args)
    if args == ["--version"]:
        write(installed_versions.format_versions())
        return 0
    if args[:1] in (
        ["run"],
        ["launch"],
        ["doctor"],
    ):  # their processes are to use what this host has
        return _run(args)
    if not os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = "cpu"  # for child processes; this one has read it
        Setting.PLATFORMS.set("cpu")
    return _run(args)


def _run(args: Sequence[str]) -> int:
    try:
        options = read(args)
        command = next(c for c in COMMANDS.values() if isinstance(options, c.Options))
        return command.run(options)
    except WrongUse as error:
        say(f"tpudist: {error}")
        return WRONG_USE
    except KeyboardInterrupt:
        say("tpudist: interrupted.")
        return INTERRUPTED


def read(args: Sequence[str] | None = None) -> Any:
    """The options of the subcommand that a command line names; ends the process if it is wrong.

    Raises:
        WrongUse: `run` or `launch` have no such option.
    """
    args = sys.argv[1:] if args is None else list(args)
    own: list[str] = []
    if args[:1] in (["run"], ["launch"]):
        first, own = launch_command.split(args[1:])
        launch_command.check_names(first, args[0], COMMANDS[args[0]].Options)
        args = [args[0], *first]
    options = tyro.cli(
        _subcommands(),
        args=args,
        prog="tpudist",
        description="Plans training steps for TPU slices that nobody has rented, ports programs "
        "and starts runs. tpudist --version says which tpudist this is.",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.CascadeSubcommandArgs),
    )
    return dataclasses.replace(options, arguments=tuple(own)) if own else options


def _subcommands() -> Any:
    """The options of all commands, as tyro takes them."""
    options = (
        Annotated[command.Options, tyro.conf.subcommand(name)] for name, command in COMMANDS.items()
    )
    return functools.reduce(operator.or_, options)
