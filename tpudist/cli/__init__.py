"""The command `tpudist`: one module per subcommand, each with its `Options`, `EPILOG` and `run`.

A subcommand is imported when it is used, so that help and errors take a fraction of a second.
Exit codes: 0 for yes (it fits), 1 for no, 2 for wrong use or if there is no answer, 130 after
Ctrl-C. Plans use no accelerator: JAX uses the CPU unless `JAX_PLATFORMS` names something else.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from tpudist.cli import option_check
from tpudist.cli.console import print_message, print_text
from tpudist.cli.errors import WrongUse
from tpudist.processes.exit_codes import EXIT_INTERRUPTED

WRONG_USE = 2
COMMANDS: Mapping[str, str] = {
    "plan": "Compile a training step for a TPU slice; show its memory, time and communication.",
    "size": "Find the largest batch, the smallest slice or the cheapest run of a training step.",
    "plan-server": "Plan a server of a language model: its speed, and how many sequences fit.",
    "topologies": "List TPU generations, their slices and the rates that plans use.",
    "run": "Run a program as one process, for example on emulated devices.",
    "launch": "Run a program as several processes, on one host or on many.",
    "doctor": "Check this machine or its accelerators, or explain the time of a run.",
    "port": "Port a program from tf.distribute to tpudist.",
}
_HELP = """usage: tpudist COMMAND [OPTIONS]

Train on any mesh of devices with the programming model of tf.distribute.

commands:
{commands}

options:
  -h, --help   Show this help, or with a command the help of the command.
  --version    Print the versions of tpudist and its dependencies.

examples:
  tpudist run --emulate 8 train.py
  tpudist plan --topology v5e-64 --preset llama-3.1-8b --replica-axes fsdp=64

exit codes: 0 success, 1 negative result, 2 wrong use, 130 interrupted
"""
# These commands use JAX without a device. `port` does not use JAX, and the others choose their
# platform.
_ON_CPU = ("plan", "plan-server", "size", "topologies")


def main(args: Sequence[str] | None = None) -> int:
    """Reads the command line (or `args`) and runs it; returns the exit code."""
    args = sys.argv[1:] if args is None else list(args)
    try:
        if args == ["--version"]:
            from tpudist.cli import installed_versions

            print_text(installed_versions.format_versions())
            return 0
        if args[:1] == ["help"] and len(args) > 1:
            args = [*args[1:], "--help"]
        if not args or args[0] in ("-h", "--help", "help"):
            # The help lists the commands from `COMMANDS`, without their modules, whose imports take
            # seconds.
            names = "\n".join(f"  {name:<12} {text}" for name, text in COMMANDS.items())
            print_text(_HELP.format(commands=names).rstrip())
            return 0 if args else WRONG_USE
        if args[0] in _ON_CPU and not os.environ.get("JAX_PLATFORMS"):
            _use_cpu()
        # After the platform is set: `parse` imports the module of the command, and the first use of
        # a device fixes the platform of the process.
        options = parse(args)
        return find_command(args[0]).run(options)
    except WrongUse as error:
        print_message(f"tpudist: {error}")
        return WRONG_USE
    except KeyboardInterrupt:
        print_message("tpudist: interrupted.")
        return EXIT_INTERRUPTED


def _use_cpu() -> None:
    from tpudist.xla.settings import Setting

    # JAX has read the variable in this process already; child processes will read it.
    os.environ["JAX_PLATFORMS"] = "cpu"
    Setting.PLATFORMS.set("cpu")


def find_command(name: str) -> ModuleType:
    """Returns the module of a subcommand.

    Raises:
        WrongUse: If there is no such subcommand.
    """
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        suggestion = f" Did you mean {near[0]}?" if near else ""
        raise WrongUse(
            f"There is no command {name}.{suggestion} The commands are {', '.join(COMMANDS)}."
        )
    return importlib.import_module(f"tpudist.cli.{name.replace('-', '_')}_command")


def parse(args: Sequence[str]) -> Any:
    """Returns the `Options` of the subcommand of a command line.

    Ends the process if the command line asks for help, or if an option is wrong.

    Raises:
        WrongUse: If there is no such subcommand or option, or if a value is not a number.
    """
    import tyro

    name, *rest = args
    command = find_command(name)
    # The arguments of a program stay apart: they may look like options of the command.
    program_arguments: list[str] = []
    takes_program = name in ("run", "launch")
    if takes_program:
        from tpudist.cli import launch_command

        rest, program_arguments = launch_command.split_at_program(rest)
    # Before tyro, which ends the process with a page of usage for any mistake. These checks cover
    # the frequent ones with one line; tyro still rejects the rest, such as a value outside of a
    # Literal.
    option_check.check_names(rest, name, command.Options, takes_program)
    option_check.check_numbers(rest, command.Options)
    try:
        options = tyro.cli(
            command.Options,
            args=rest,
            prog=f"tpudist {name}",
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.CascadeSubcommandArgs),
        )
    except SystemExit as end:
        # tyro ends with 0 after the help, and with 2 after a mistake: only the help gets the
        # examples.
        if not end.code:  # after the help
            print_text(command.EPILOG.rstrip())
        raise
    if program_arguments:
        options = dataclasses.replace(options, arguments=tuple(program_arguments))
    return options
