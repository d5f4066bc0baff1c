"""ServerDef: the cluster and the task of a server."""

import dataclasses
import socket
from collections.abc import Iterable, Mapping

from tpudist.cluster_resolver.cluster_spec import ClusterSpec, Tasks

PROTOCOL = "grpc"
"""The only protocol of servers."""


@dataclasses.dataclass(frozen=True)
class ServerDef:
    """The definition of a `tpudist.Server`.

    Mirrors `tf.train.ServerDef`, which is a protocol buffer with a `ClusterDef` and a configuration
    of sessions.

    Attributes:
        cluster: All jobs and tasks.
        job_name: Job of the server.
        task_index: Number of the server in its job.
        protocol: Protocol between tasks; always `grpc`.
    """

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str = PROTOCOL

    @property
    def address(self) -> str:
        """Address of the server, `host:port`."""
        return self.cluster.task_address(self.job_name, self.task_index)


def make_server_def(
    server_or_cluster_def: ServerDef | ClusterSpec | Mapping[str, Tasks],
    job_name: str | None = None,
    task_index: int | None = None,
    protocol: str | None = None,
) -> ServerDef:
    """Returns the definition of a server from the arguments of `tpudist.Server`.

    Raises:
        TypeError: If `server_or_cluster_def` is neither a ServerDef nor a cluster.
        ValueError: If the job or the task does not exist, or is omitted and there are several; or
            if `protocol` is not supported.
    """
    if isinstance(server_or_cluster_def, ServerDef):
        default = server_or_cluster_def
        cluster = ClusterSpec(default.cluster)
        job_name = default.job_name if job_name is None else job_name
        task_index = default.task_index if task_index is None else task_index
        protocol = default.protocol if protocol is None else protocol
    else:
        try:
            cluster = ClusterSpec(server_or_cluster_def)
        except TypeError as error:
            raise TypeError(
                f"Server({server_or_cluster_def!r:.200}): pass a "
                f"tpudist.cluster_resolver.ServerDef, a ClusterSpec, or a dict of jobs. {error}"
            ) from None
    job_name = _find_job(cluster) if job_name is None else job_name
    task_index = _find_task(cluster, job_name) if task_index is None else int(task_index)
    protocol = PROTOCOL if protocol is None else protocol
    if protocol != PROTOCOL:
        raise ValueError(
            f"Server(protocol={protocol!r}): the only protocol is {PROTOCOL!r}. Omit protocol."
        )
    cluster.task_address(job_name, task_index)  # raises if there is no such task
    return ServerDef(cluster, job_name, task_index, protocol)


def _find_job(cluster: ClusterSpec) -> str:
    """Returns the only job of a cluster."""
    if len(cluster.jobs) != 1:
        raise ValueError(
            f"Server() needs a job_name, because the cluster has the jobs {cluster.jobs}. "
            f"Pass the job of this process, such as job_name=resolver.task_type."
        )
    return cluster.jobs[0]


def _find_task(cluster: ClusterSpec, job_name: str) -> int:
    """Returns the number of the only task of a job."""
    indices = cluster.task_indices(job_name)
    if len(indices) != 1:
        raise ValueError(
            f"Server() needs a task_index, because job {job_name!r} has the tasks {indices}. "
            f"Pass the task of this process, such as task_index=resolver.task_id."
        )
    return indices[0]


def find_other_host(spec: ClusterSpec, jobs: Iterable[str]) -> tuple[str, int, str] | None:
    """Returns job, number and address of the first task on another host, or None."""
    # Only names that certainly are this host: an IP address of this host counts as another host.
    here = {"localhost", "127.0.0.1", "::1", "", socket.gethostname()}
    for job in jobs:
        for index in spec.task_indices(job):
            address = spec.task_address(job, index)
            # IPv6 addresses have brackets and colons of their own: "[::1]:2222".
            if address.rsplit(":", 1)[0].strip("[]") not in here:
                return job, index, address
    return None
