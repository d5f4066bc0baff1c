"""ServerDef: which task of which cluster a server is."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterable
from typing import Any

from tpudist.cluster_resolver.cluster_spec import ClusterSpec

PROTOCOL = "grpc"
"""The only one that there is."""


@dataclasses.dataclass(frozen=True)
class ServerDef:
    """The definition of a `tpudist.Server`.

    As `tf.train.ServerDef`, which is a protocol buffer, has a `ClusterDef` for a cluster, and also
    says how sessions are configured.

    Attributes:
        cluster: All jobs and tasks.
        job_name: The job of the server.
        task_index: Its number in the job.
        protocol: How tasks talk to each other; always `grpc`.
    """

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str = PROTOCOL

    @property
    def address(self) -> str:
        """The address of the server, `host:port`."""
        return self.cluster.task_address(self.job_name, self.task_index)


def make_server_def(
    server_or_cluster_def: Any,
    job_name: str | None = None,
    task_index: int | None = None,
    protocol: str | None = None,
) -> ServerDef:
    """The definition of a server, of what `tpudist.Server` was given.

    Raises:
        TypeError: It is neither a ServerDef nor a cluster.
        ValueError: The job or the task is not named and there are several, or there is none of that
            name or number; or another protocol.
    """
    if isinstance(server_or_cluster_def, ServerDef):
        given = server_or_cluster_def
        cluster = ClusterSpec(given.cluster)
        job_name = given.job_name if job_name is None else job_name
        task_index = given.task_index if task_index is None else task_index
        protocol = given.protocol if protocol is None else protocol
    else:
        try:
            cluster = ClusterSpec(server_or_cluster_def)
        except TypeError as error:
            raise TypeError(
                f"Server({server_or_cluster_def!r:.200}): pass a "
                f"tpudist.cluster_resolver.ServerDef, a ClusterSpec, or a dict of jobs. {error}"
            ) from None
    if job_name is None:
        if len(cluster.jobs) != 1:
            raise ValueError(
                f"Server() needs a job_name, because the cluster has the jobs {cluster.jobs}. "
                f"Pass the job of this process, such as job_name=resolver.task_type."
            )
        (job_name,) = cluster.jobs
    indices = cluster.task_indices(job_name)
    if task_index is None:
        if len(indices) != 1:
            raise ValueError(
                f"Server() needs a task_index, because job {job_name!r} has the tasks {indices}. "
                f"Pass the task of this process, such as task_index=resolver.task_id."
            )
        (task_index,) = indices
    protocol = PROTOCOL if protocol is None else protocol
    if protocol != PROTOCOL:
        raise ValueError(
            f"Server(protocol={protocol!r}): the only protocol is {PROTOCOL!r}. Omit protocol."
        )
    made = ServerDef(cluster, job_name, int(task_index), protocol)
    cluster.task_address(made.job_name, made.task_index)
    return made


def find_other_host(spec: ClusterSpec, jobs: Iterable[str]) -> tuple[str, int, str] | None:
    """The first task on another host than this one: job, number and address."""
    here = {"localhost", "127.0.0.1", "::1", "", socket.gethostname()}
    for job in jobs:
        for index in spec.task_indices(job):
            address = spec.task_address(job, index)
            if address.rsplit(":", 1)[0].strip("[]") not in here:
                return job, index, address
    return None
