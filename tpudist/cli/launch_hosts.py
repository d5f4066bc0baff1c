"""On which hosts `tpudist launch` runs: as the command line says, or the scheduler."""

import os
from collections.abc import Mapping

from tpudist.cli.errors import WrongUse
from tpudist.cluster_resolver.slurm import expand_hostlist
from tpudist.cluster_resolver.tpu_hosts import find_slice_hosts
from tpudist.supervisor.hosts import PORT, Hosts, find_this_host


def find_hosts(names: str | None, index: int | None, port: int | None) -> Hosts:
    """The hosts of the run: one unless several are named, here or by Slurm or a TPU slice.

    Args:
        names: Separated by commas; the first is where they meet.
        index: Which of them is this one; by default the one whose address is this host's.
        port: Of the first; see `Hosts`.

    Raises:
        WrongUse: None of them is this host, or several are.
    """
    if names is None:
        found = _hosts_of_slurm(os.environ) or _hosts_of_tpu()
        if found is None:
            return Hosts()
        return Hosts(found[0], found[1], port or PORT)
    hosts = _split(names)
    if index is None:
        here = find_this_host(hosts)
        if len(here) != 1:
            which = " and ".join(hosts[i] for i in here) or "none"
            raise WrongUse(
                f"--hosts {names}: found {which} among the addresses of this host. Pass "
                f"--host-index, from 0."
            )
        index = here[0]
    if not 0 <= index < len(hosts):
        raise WrongUse(f"--host-index {index}: must be from 0 to {len(hosts) - 1}.")
    return Hosts(hosts, index, port or PORT) if len(hosts) > 1 else Hosts()


def name_hosts(names: str | None) -> list[str]:
    """Names of the hosts of the run, of which this one may be none; empty if they are not said.

    Raises:
        WrongUse: One is named twice.
    """
    if names is not None:
        return _split(names)
    found = _hosts_of_slurm(os.environ) or _hosts_of_tpu()
    return list(found[0]) if found else []


def _split(names: str) -> list[str]:
    hosts = [name.strip() for name in names.split(",") if name.strip()]
    if len(set(hosts)) < len(hosts) or not hosts:
        raise WrongUse(f"--hosts {names}: name each host once, as in --hosts node1,node2.")
    return hosts


def _hosts_of_slurm(env: Mapping[str, str]) -> tuple[list[str], int] | None:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodes is None or "SLURM_NODEID" not in env or "SLURM_PROCID" not in env:
        return None
    hosts = expand_hostlist(nodes)
    if len(hosts) < 2:
        return None
    if int(env.get("SLURM_STEP_NUM_TASKS", len(hosts))) != len(hosts):
        raise WrongUse(
            f"Slurm starts {env['SLURM_STEP_NUM_TASKS']} tasks on {len(hosts)} nodes. Start one "
            f"tpudist launch per node: srun --ntasks-per-node=1 tpudist launch -n ..."
        )
    return hosts, int(env["SLURM_NODEID"])


def _hosts_of_tpu() -> tuple[list[str], int] | None:
    try:
        found = find_slice_hosts()
    except ValueError as error:
        raise WrongUse(str(error)) from None
    count = os.environ.get("MEGASCALE_NUM_SLICES", "1")
    if count not in ("", "1"):
        raise WrongUse(
            f"MEGASCALE_NUM_SLICES is {count}, and a host knows only the hosts of its own slice. "
            f"Pass the hosts of all slices: --hosts HOST,HOST,..."
        )
    return (found.names, found.index) if found else None
