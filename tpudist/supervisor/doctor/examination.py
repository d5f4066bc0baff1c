"""All checks of this machine before a run: first what only looks, then what starts devices."""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tpudist.supervisor.doctor import (
    clock_check,
    device_check,
    disk_check,
    environment_check,
    machine_checks,
    network_checks,
    tpu_check,
    version_check,
)
from tpudist.supervisor.doctor.checks import Answer, Check, Verdict, run_checks
from tpudist.supervisor.doctor.cluster_environment import look_at_cluster, read_cluster

DEVICES_PER_PROCESS = 2
"""Of several local processes, where no number is given."""


def examine(
    num_emulated: int | None = None,
    num_processes: int = 1,
    timeout_s: float = 60.0,
    python: str = sys.executable,
) -> list[Answer]:
    """What the checks of this machine have found, within 15 s more than `timeout_s`.

    Args:
        num_emulated: Emulated devices to start, of each process; None for those of this host.
        num_processes: How many local processes of emulated devices meet; one does not.
        timeout_s: How long devices, and processes, may take.
        python: The Python that starts them.
    """
    answers = run_checks(_quick_checks())
    # Only now: libtpu in a child would hold the lock that was looked for.
    look = functools.partial(device_check.look_at_devices, num_emulated, timeout_s, python)
    slow = [Check("devices", look, timeout_s + device_check.END_S)]
    if num_processes > 1:
        devices = num_emulated or DEVICES_PER_PROCESS
        meet = functools.partial(
            device_check.meet_locally, num_processes, devices, timeout_s, python
        )
        slow.append(Check("processes", meet, timeout_s + device_check.END_S))
    return answers + run_checks(slow)


def is_well(answers: Sequence[Answer]) -> bool:
    """Whether nothing fails; a warning is no failure."""
    return all(x.verdict is not Verdict.FAIL for x in answers)


def _quick_checks() -> list[Check]:
    cluster = read_cluster()
    here = Path(os.getcwd())
    looks: dict[str, Callable[[], Sequence[Answer]]] = {
        "versions": version_check.look_at_versions,
        "libtpu": tpu_check.look_for_libtpu,
        "TPU in use": tpu_check.look_for_holders,
        "cluster": look_at_cluster,
        "host names": lambda: network_checks.look_up_hosts(cluster),
        "this host's name": lambda: network_checks.look_up_this_host(cluster),
        "coordinator's port": lambda: network_checks.try_port(cluster),
        "other processes": lambda: network_checks.reach_others(cluster),
        "proxies": lambda: environment_check.look_at_proxies(cluster),
        "variables": lambda: environment_check.look_at_variables(cluster),
        "clock": clock_check.look_at_clock,
        "memory": machine_checks.look_at_memory,
        "shared memory": machine_checks.look_at_shared_memory,
        "open files": machine_checks.look_at_open_files,
        "cores": machine_checks.look_at_cores,
        "working folder": lambda: disk_check.look_at_folder("working folder", here),
        "temporary folder": disk_check.look_at_temporary_folder,
        "compilation cache": disk_check.look_at_cache,
    }
    return [Check(asked, look) for asked, look in looks.items()]
