"""`tpudist launch`: runs a program as several processes, on one host or on many."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from tpudist.cli import console, option_types
from tpudist.cli.errors import WrongUse, as_wrong_use
from tpudist.options.member_names import format_members

EPILOG = """
examples:
  tpudist launch -n 2 --devices-per-process 4 train.py --steps 10
  tpudist launch --hosts 10.0.0.1,10.0.0.2 train.py

exit codes: 0 success, 2 wrong use, 70 no restart is left, 130 Ctrl-C, 143 SIGTERM;
otherwise the code of the first process that failed, or 128 + n if signal n killed it
(137 is SIGKILL). Without --restarts, start again after 75, 137 or 143; with it, after 70 or 143.
"""

_MAX_HOSTS = 3  # of a dry run that shows the command of each host


@dataclass(frozen=True)
class Options:
    """Run a program as several processes, on one host or on many."""

    script: option_types.Script
    """Python file, or another program."""
    arguments: option_types.Arguments = ()
    """Arguments passed to the program."""
    num_processes: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")] = 1
    """Number of processes per host; tpudist sets TF_CONFIG for each."""
    devices_per_process: option_types.Count = None
    """Number of emulated devices per process (default: the devices of the host)."""
    restarts: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Number of restarts after a lost process; with survive(), of replacements."""
    hosts: Annotated[str | None, option_types.value_name(metavar="HOST[,HOST...]")] = None
    """Hosts; run the same command on each (default: Slurm step, TPU slice, or this host)."""
    host_index: Annotated[int | None, option_types.value_name(metavar="I")] = None
    """Index of this host in --hosts, from 0 (default: found by its addresses)."""
    port: Annotated[int | None, option_types.value_name(metavar="PORT")] = None
    """First port to use, one per process, for rendezvous on the first host (default: 8470)."""
    spares: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Number of standby processes that replace lost ones; needs experimental.survive."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the processes and commands of each host; start nothing."""


def split_at_program(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the command line up to the program, and the arguments of the program.

    tyro would read options of the program as its own.
    """
    # The program is the first word that is neither an option nor the value of one. All options take
    # a value, except these few.
    i = 0
    # `i` grows in each round, so the loop ends. A new flag without a value must be added to the
    # list below, or its next word would be taken for its value and not for the program.
    while i < len(args) and args[i].startswith("-"):
        has_value = "=" in args[i] or (
            not args[i].startswith("--") and len(args[i]) > 2
        )  # as in -n2
        takes_value = not has_value and args[i] not in ("-h", "--help", "--", "--dry-run")
        i += 2 if takes_value else 1
    return list(args[: i + 1]), list(args[i + 1 :])


def run(options: Options) -> int:
    """Runs the program; returns the exit code."""
    from tpudist.cli.launch_hosts import find_hosts
    from tpudist.processes.judge.process_judge import hang_timeout
    from tpudist.supervisor.launch import Launch

    _check_numbers(options)
    with as_wrong_use(ValueError):
        hang_timeout()
    command = [*find_program(options.script), *options.arguments]
    if options.dry_run:
        return _print_commands(options)
    lock = threading.Lock()  # threads read the outputs of the processes
    width = len(str(options.num_processes - 1))

    def write(index: int | None, line: str) -> None:
        label = "tpudist" if index is None else f"{index:>{width}}"
        with lock:
            console.print_text(f"[{label}] {line}")

    launch = Launch(
        command,
        num_processes=options.num_processes,
        devices_per_process=options.devices_per_process,
        restarts=options.restarts,
        write=write,
        spares=options.spares,
        hosts=find_hosts(options.hosts, options.host_index, options.port),
    )
    return launch.run()


def _check_numbers(options: Options) -> None:
    least = {"num-processes": 1, "devices-per-process": 1, "restarts": 0, "spares": 0}
    numbers = {name.replace("_", "-"): value for name, value in vars(options).items()}
    for name, minimum in least.items():
        if (value := numbers[name]) is not None and value < minimum:
            raise WrongUse(f"--{name} {value}: must be at least {minimum}.")


def _print_commands(options: Options) -> int:
    from tpudist.cli.launch_hosts import name_hosts, shorten_hosts
    from tpudist.supervisor.hosts import LOOPBACK

    # `name_hosts` and not `find_hosts`: a dry run may be on a machine that is not one of the hosts.
    hosts = name_hosts(options.hosts) or [LOOPBACK]
    shared: list[str] = []
    # Only options that differ from their defaults. The hosts and the port are added below.
    chosen, defaults = vars(options), vars(Options(script=options.script))
    for name in ("num_processes", "devices_per_process", "restarts", "spares"):
        if chosen[name] != defaults[name]:
            shared += [f"--{name.replace('_', '-')}", str(chosen[name])]
    program = [options.script, *options.arguments]
    num_processes = options.num_processes
    if len(hosts) == 1:
        heading = f"{num_processes} process(es) on this host:"
        console.print_text(f"{heading}\n  {shlex.join(['tpudist', 'launch', *shared, *program])}")
        return 0
    if options.port is not None:
        shared += ["--port", str(options.port)]
    console.print_text(
        f"{len(hosts)} hosts, {len(hosts) * num_processes} processes: run on each host, in the "
        f"same folder,"
    )
    if len(hosts) > _MAX_HOSTS:
        last = len(hosts) - 1
        command = f'--hosts "$HOSTS" --host-index "$I" {shlex.join([*shared, *program])}'
        console.print_text(
            f"with HOSTS={shorten_hosts(','.join(hosts))}, from {hosts[0]} (I=0, "
            f"{_list_processes(0, num_processes)}) to {hosts[-1]} (I={last}, "
            f"{_list_processes(last, num_processes)}):\n  tpudist launch {command}"
        )
    else:
        for i, host in enumerate(hosts):
            words = ["launch", "--hosts", ",".join(hosts), "--host-index", str(i), *shared]
            command = shlex.join(["tpudist", *words, *program])
            console.print_text(f"{host} ({_list_processes(i, num_processes)}):\n  {command}")
    command = shlex.quote(shlex.join(["tpudist", "launch", *shared, *program]))
    console.print_text(
        f"or, for the hosts of a TPU slice, from anywhere, on all of them at once:\n"
        f"  gcloud compute tpus tpu-vm ssh NAME --worker=all --command {command}"
    )
    return 0


def _list_processes(host_index: int, per_host: int) -> str:
    return format_members("process", range(host_index * per_host, (host_index + 1) * per_host))


def find_program(script: str) -> list[str]:
    """Returns the command that runs a Python file or another program.

    Raises:
        WrongUse: If there is no such file or program.
    """
    if script.endswith(".py"):
        if not os.path.isfile(script):
            raise WrongUse(f"{script}: no such file in {os.getcwd()}.")
        return [sys.executable, script]
    if shutil.which(script) is None:
        raise WrongUse(f"{script}: no such program. A Python file must end in .py.")
    return [script]
