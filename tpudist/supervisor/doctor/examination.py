"""Runs all checks of this machine: first the quick checks, then the checks of devices."""

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
from tpudist.supervisor.doctor.checks import (
    QUICK_S,
    Answer,
    Check,
    Verdict,
    call_each,
    run_checks,
)
from tpudist.supervisor.doctor.cluster_environment import Cluster, check_cluster, read_cluster

DEVICES_PER_PROCESS = 2
"""Default number of emulated devices of each local process."""


def examine(
    num_emulated: int | None = None,
    num_processes: int = 1,
    timeout_s: float = 60.0,
    python: str = sys.executable,
) -> list[Answer]:
    """Returns the answers of all checks, within 30 s more than `timeout_s`.

    Args:
        num_emulated: Number of emulated devices to start in each process; None for the devices of
            this host.
        num_processes: Number of local processes that connect; 1 omits that check.
        timeout_s: Seconds for devices, and for processes.
        python: Python interpreter that starts them.
    """
    answers = run_checks(_quick_checks())
    # Afterwards, because libtpu in a child process holds the lock for which the quick checks look.
    check = functools.partial(device_check.check_devices, num_emulated, timeout_s, python)
    slow = [Check("devices", check, timeout_s + device_check.END_S)]
    if num_processes > 1:
        devices = num_emulated or DEVICES_PER_PROCESS
        check = functools.partial(
            device_check.check_local_processes, num_processes, devices, timeout_s, python
        )
        slow.append(Check("processes", check, timeout_s + device_check.END_S))
    return answers + run_checks(slow)


def is_well(answers: Sequence[Answer]) -> bool:
    """Whether no check failed; warnings are allowed."""
    return all(x.verdict is not Verdict.FAIL for x in answers)


def _read_cluster() -> Cluster:
    # The metadata server of a TPU VM may not answer.
    (cluster,) = call_each(lambda _: read_cluster(), ["cluster"], QUICK_S).values()
    if isinstance(cluster, Exception):
        return Cluster(problem=f"cannot read the cluster: {cluster}")
    return cluster


def _quick_checks() -> list[Check]:
    cluster = _read_cluster()
    here = Path(os.getcwd())
    checks: dict[str, Callable[[], Sequence[Answer]]] = {
        "versions": version_check.check_versions,
        "libtpu": tpu_check.check_libtpu,
        "TPU in use": tpu_check.check_tpu_users,
        "cluster": lambda: check_cluster(cluster),
        "host names": lambda: network_checks.check_host_names(cluster),
        "this host's name": lambda: network_checks.check_host_name(cluster),
        "coordinator's port": lambda: network_checks.check_port(cluster),
        "other processes": lambda: network_checks.check_connections(cluster),
        "proxies": lambda: environment_check.check_proxies(cluster),
        "variables": lambda: environment_check.check_variables(cluster),
        "clock": clock_check.check_clock,
        "memory": machine_checks.check_memory,
        "shared memory": machine_checks.check_shared_memory,
        "open files": machine_checks.check_open_files,
        "cores": machine_checks.check_cores,
        "working folder": lambda: disk_check.check_folder("working folder", here),
        "temporary folder": disk_check.check_temporary_folder,
        "compilation cache": disk_check.check_cache,
    }
    return [Check(asked, check) for asked, check in checks.items()]
