"""The cluster that the environment names: TF_CONFIG, a TPU slice's hosts, or a Slurm job's nodes.

For checks only, which must say something of what `tpudist.cluster_resolver` refuses, too.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tpudist.cluster_resolver.tpu_hosts import find_slice_hosts
from tpudist.processes import rendezvous
from tpudist.supervisor.doctor.checks import Answer, Verdict

TPU_PORT = 8476
"""Of the coordinator on TPU, where nothing says another one; JAX's."""
_SLURM_PORT = 8888  # of SlurmClusterResolver
_JOBS = ("chief", "worker")  # those that train together, in this order


@dataclass(frozen=True)
class Cluster:
    """Which processes take part.

    Attributes:
        source: The variable that says so; "" if none does.
        addresses: `host:port` of each, the first one's first.
        index: Which of them this process is; None if that is not said.
        problem: What is wrong with it; "" if nothing is.
    """

    source: str = ""
    addresses: tuple[str, ...] = ()
    index: int | None = None
    problem: str = ""

    @property
    def hosts(self) -> list[str]:
        """The hosts, each once."""
        return list(dict.fromkeys(rendezvous.parse_address(x)[0] for x in self.addresses))


def read_cluster(environ: Mapping[str, str] = os.environ) -> Cluster:
    """The cluster of an environment; without addresses if there is none, or it is wrong."""
    slurm = next((x for x in ("STEP", "JOB") if environ.get(f"SLURM_{x}_NODELIST")), "")
    source = ""
    try:
        if environ.get("TF_CONFIG"):
            source = "TF_CONFIG"
            found = _read_tf_config(environ[source])
        elif "," in environ.get("TPU_WORKER_HOSTNAMES", ""):
            source = "TPU_WORKER_HOSTNAMES"
            hosts = [x.strip() for x in environ[source].split(",") if x.strip()]
            number = environ.get("TPU_WORKER_ID", "")
            index = int(number) if number.isdigit() else None
            found = Cluster(source, tuple(f"{x}:{TPU_PORT}" for x in hosts), index)
        elif slurm:
            source = f"SLURM_{slurm}_NODELIST"
            hosts = list(expand_nodes(environ[source]))
            number = environ.get("SLURM_PROCID", "")
            index = int(number) if number.isdigit() and len(hosts) > 1 else None
            return Cluster(source, tuple(f"{x}:{_SLURM_PORT}" for x in hosts), index)
        else:
            slice_hosts = find_slice_hosts(environ)
            if slice_hosts is None:
                return Cluster()
            source = slice_hosts.source
            addresses = tuple(f"{x}:{TPU_PORT}" for x in slice_hosts.names)
            found = Cluster(source, addresses, slice_hosts.index)
        for address in found.addresses:
            rendezvous.parse_address(address)
    except (ValueError, TypeError, AttributeError) as error:
        return Cluster(source, problem=f"{source} cannot be read: {error}")
    if found.addresses and found.index is None:
        return Cluster(source, found.addresses, None, f"{source} does not say which process it is")
    if found.index is not None and found.index >= len(found.addresses):
        count = len(found.addresses)
        problem = f"process {found.index} of {count} processes, numbered from 0"
        return Cluster(source, found.addresses, None, f"{source}: this is {problem}")
    return found


def look_at_cluster() -> list[Answer]:
    """Whether the environment names a cluster, and this process's place in it."""
    asked, cluster = "cluster", read_cluster()
    if cluster.problem:
        remedy = "Correct it, or unset it for a run of one process."
        return [Answer(asked, cluster.problem, Verdict.FAIL, remedy)]
    if not cluster.source:
        return [Answer(asked, "none in the environment: a run of one process")]
    place = "" if cluster.index is None else f", this is process {cluster.index}"
    hosts = f"{len(cluster.addresses)} address(es) on {len(cluster.hosts)} host(s)"
    return [Answer(asked, f"{cluster.source}: {hosts}{place}")]


def _read_tf_config(text: str) -> Cluster:
    config = json.loads(text)
    jobs, task = config.get("cluster", {}), config.get("task", {})
    if not jobs:
        return Cluster("TF_CONFIG")
    addresses: list[str] = []
    index: int | None = None
    for job in _JOBS:
        if task.get("type") == job and task.get("index") is not None:
            number = int(task["index"])
            if not 0 <= number < len(jobs.get(job, ())):
                raise ValueError(f"there is no task {number} of job {job!r}")
            index = len(addresses) + number
        addresses += jobs.get(job, ())
    return Cluster("TF_CONFIG", tuple(addresses), index)


def expand_nodes(nodes: str) -> Iterator[str]:
    """The nodes of Slurm's short form, as far as it is simple: `n[1-2,07],m5`.

    Raises:
        ValueError: It has another form.
    """
    part = r"([^,\[\]]+)(?:\[([\d,-]+)\])?"
    if not re.fullmatch(rf"{part}(?:,{part})*", nodes):
        raise ValueError(f"{nodes!r} does not look like 'n[1-2,07],m5'")
    for prefix, ranges in re.findall(rf"{part}(?:,|$)", nodes):
        for numbers in ranges.split(",") if ranges else ():
            first, _, last = numbers.partition("-")
            for i in range(int(first), int(last or first) + 1):
                yield prefix + str(i).zfill(len(first))
        if not ranges:
            yield prefix
