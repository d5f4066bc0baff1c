"""Reads the cluster of the environment: TF_CONFIG, the hosts of a TPU slice, or nodes of Slurm.

`tpudist.cluster_resolver` parses it, so a check accepts exactly what a strategy accepts.
"""

import os
from dataclasses import dataclass

from tpudist.cluster_resolver.slurm import read_nodes
from tpudist.cluster_resolver.slurm_lists import expand_hostlist
from tpudist.cluster_resolver.tf_config import TFConfigClusterResolver
from tpudist.cluster_resolver.tpu_hosts import TPU_PORT, find_slice_hosts
from tpudist.processes import startup_address
from tpudist.supervisor.doctor.checks import Answer, Verdict

_SLURM_PORT = 8888  # default of SlurmClusterResolver


@dataclass(frozen=True)
class Cluster:
    """The processes of a run, as the environment names them.

    Attributes:
        source: Variable that names them, or "".
        addresses: `host:port` of each process, in the order of their indices.
        index: Index of this process; None if it is unknown.
        problem: Problem of the variable, or "".
    """

    source: str = ""
    addresses: tuple[str, ...] = ()
    index: int | None = None
    problem: str = ""

    @property
    def hosts(self) -> list[str]:
        """Hosts of the processes, without repetitions."""
        return list(dict.fromkeys(startup_address.parse_address(x)[0] for x in self.addresses))


def read_cluster() -> Cluster:
    """Returns the cluster of the environment; without addresses if it is missing or wrong."""
    source = _find_source()
    try:
        if source == "TF_CONFIG":
            cluster = _of_tf_config()
        elif source.startswith("SLURM"):
            cluster = _of_slurm(source)
        else:
            cluster = _of_tpu_slice()
        for address in cluster.addresses:
            startup_address.parse_address(address)
    except (ValueError, TypeError, AttributeError) as error:
        return Cluster(source, problem=f"cannot read {source or 'the TPU slice'}: {error}")
    return cluster


def _find_source() -> str:
    """Returns the variable that names the cluster; "" if the metadata server may know one."""
    if os.environ.get("TF_CONFIG"):
        return "TF_CONFIG"
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    if "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        return "TPU_WORKER_HOSTNAMES"
    return next((name for name in names if os.environ.get(name)), "")


def _of_tf_config() -> Cluster:
    resolver = TFConfigClusterResolver()
    if resolver.is_evaluator:
        return Cluster("TF_CONFIG")
    addresses = tuple(resolver.processes())
    try:
        index = resolver.process_index() if addresses else None
    except ValueError as error:
        return Cluster("TF_CONFIG", addresses, None, f"TF_CONFIG: {error}")
    return Cluster("TF_CONFIG", addresses, index)


def _of_slurm(source: str) -> Cluster:
    # Only a step has tasks, which use consecutive ports of their node. A job has one address for
    # each node.
    if "STEP" in source and os.environ.get("SLURM_STEP_TASKS_PER_NODE"):
        nodes = read_nodes()
    else:
        nodes = [(host, 1) for host in expand_hostlist(os.environ[source])]
    addresses = tuple(f"{host}:{_SLURM_PORT + i}" for host, count in nodes for i in range(count))
    number = os.environ.get("SLURM_PROCID", "")
    index = int(number) if number.isdigit() and len(addresses) > 1 else None
    return Cluster(source, addresses, index)


def _of_tpu_slice() -> Cluster:
    hosts = find_slice_hosts()
    if hosts is None:
        return Cluster()
    addresses = tuple(f"{x}:{TPU_PORT}" for x in hosts.names)
    return Cluster(hosts.source, addresses, hosts.index)


def check_cluster(cluster: Cluster) -> list[Answer]:
    """Checks whether the environment names a valid cluster, and this process in it."""
    asked = "cluster"
    if cluster.problem:
        remedy = "Correct it, or unset it to run a single process."
        return [Answer(asked, cluster.problem, Verdict.FAIL, remedy)]
    if not cluster.source:
        return [Answer(asked, "none in the environment: a run with one process")]
    if not cluster.addresses:
        return [Answer(asked, f"{cluster.source}: this process runs alone")]
    place = "" if cluster.index is None else f", this is process {cluster.index}"
    hosts = f"{len(cluster.addresses)} address(es) on {len(cluster.hosts)} host(s)"
    return [Answer(asked, f"{cluster.source}: {hosts}{place}")]
