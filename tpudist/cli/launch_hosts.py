"""The hosts of `tpudist launch`: from its options, from Slurm, or from a TPU slice."""

import os
from collections.abc import Mapping

from tpudist.cli.errors import WrongUse, as_wrong_use
from tpudist.cluster_resolver.slurm_lists import expand_hostlist
from tpudist.cluster_resolver.tpu_hosts import find_slice_hosts
from tpudist.supervisor.hosts import PORT, Hosts, find_this_host

_MAX_NAMES = 4  # of hosts in a message


def find_hosts(names: str | None, index: int | None, port: int | None) -> Hosts:
    """Returns the hosts of the run; only this host if neither options, Slurm nor a slice name more.

    Args:
        names: Names, separated by commas; all hosts connect to the first.
        index: Index of this host; by default found by its addresses.
        port: Port on the first host; see `Hosts`.

    Raises:
        WrongUse: If no name, or more than one, is an address of this host.
    """
    if names is None:
        detected = _detect_hosts()
        if detected is None:
            return Hosts()
        detected_names, index_of_this = detected
        return Hosts(detected_names, index_of_this, port or PORT)
    hosts = _split(names)
    if index is None:
        # A name of another host cannot be bound here. Several names match if they are aliases of
        # this host, or if localhost is among them; then the index cannot be guessed.
        matches = find_this_host(hosts)
        if len(matches) != 1:
            local = " and ".join(hosts[i] for i in matches) or "none"
            raise WrongUse(
                f"--hosts {shorten_hosts(names)}: found {local} among the addresses of this host. "
                f"Pass --host-index, from 0."
            )
        index = matches[0]
    if not 0 <= index < len(hosts):
        raise WrongUse(f"--host-index {index}: must be from 0 to {len(hosts) - 1}.")
    # One host needs no rendezvous, so its processes use free ports of the loopback interface.
    return Hosts(hosts, index, port or PORT) if len(hosts) > 1 else Hosts()


def name_hosts(names: str | None) -> list[str]:
    """Returns the names of the hosts of the run, for a dry run on any machine; empty if unknown.

    Raises:
        WrongUse: If a name occurs twice.
    """
    if names is not None:
        return _split(names)
    detected = _detect_hosts()
    return list(detected[0]) if detected else []


def _detect_hosts() -> tuple[list[str], int] | None:
    # Slurm before the TPU's metadata: a Slurm step may use only some hosts of a slice.
    return _hosts_of_slurm(os.environ) or _hosts_of_tpu()


def _split(names: str) -> list[str]:
    hosts = [name.strip() for name in names.split(",") if name.strip()]
    if len(set(hosts)) < len(hosts) or not hosts:
        raise WrongUse(
            f"--hosts {shorten_hosts(names)}: name each host once, as in --hosts node1,node2."
        )
    return hosts


def shorten_hosts(names: str) -> str:
    """Returns names of hosts, separated by commas, for a message: the first ones of many."""
    shown = names.split(",")
    more = len(shown) - _MAX_NAMES
    return names if more <= 0 else f"{','.join(shown[:_MAX_NAMES])},... ({more} more)"


def _hosts_of_slurm(env: Mapping[str, str]) -> tuple[list[str], int] | None:
    # The step, if there is one, may use only some nodes of the job.
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodes is None or "SLURM_NODEID" not in env or "SLURM_PROCID" not in env:
        return None
    hosts = expand_hostlist(nodes)
    if len(hosts) < 2:
        return None
    # With several tasks per node, each would start all processes of its node, and they would fight
    # for the ports. `launch` must be the only task of a node.
    if int(env.get("SLURM_STEP_NUM_TASKS", len(hosts))) != len(hosts):
        raise WrongUse(
            f"Slurm starts {env['SLURM_STEP_NUM_TASKS']} tasks on {len(hosts)} nodes. Start one "
            f"tpudist launch per node: srun --ntasks-per-node=1 tpudist launch -n ..."
        )
    return hosts, int(env["SLURM_NODEID"])


def _hosts_of_tpu() -> tuple[list[str], int] | None:
    with as_wrong_use(ValueError):
        slice_hosts = find_slice_hosts()
    # libtpu's variable for runs over several slices.
    count = os.environ.get("MEGASCALE_NUM_SLICES", "1")
    if count not in ("", "1"):
        raise WrongUse(
            f"MEGASCALE_NUM_SLICES is {count}, and a host knows only the hosts of its own slice. "
            f"Pass the hosts of all slices: --hosts HOST,HOST,..."
        )
    return (slice_hosts.names, slice_hosts.index) if slice_hosts else None
