"""Server: runs this machine as a worker or a parameter server of a program that runs elsewhere."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

from tpudist.cluster_resolver.cluster_spec import ClusterSpec
from tpudist.cluster_resolver.server_def import ServerDef, find_other_host, make_server_def
from tpudist.engine.ray.ray_node import RayNode

CHIEF_JOB = "chief"
"""Job of the program that schedules functions."""
SERVER_JOBS = ("worker", "ps")
"""Jobs of the machines that join the program."""


class Server:
    """One task of a cluster that a program with a `tpudist.ParameterServerStrategy` uses.

    In a cluster with the job `chief`, this machine joins the Ray that the chief's program starts at
    the chief's address. The worker or server of the strategy with this task's number runs here
    (`pip install 'tpudist[ray]'`). It ends with this process, however that ends, or with the
    program. Every machine needs the same token, in RAY_AUTH_TOKEN, in the file RAY_AUTH_TOKEN_PATH,
    or in ~/.ray/auth_token. Anybody with the token can run code here.

    In a cluster without a chief, all tasks must be on this machine: workers and servers are threads
    of the program that creates the strategy. The object then only reports its arguments.

    Args:
        server_or_cluster_def: The cluster, as a `tpudist.cluster_resolver.ClusterSpec` or a dict of
            jobs, or a `tpudist.cluster_resolver.ServerDef`. The next three arguments override it.
        job_name: `worker` or `ps`. By default the only job of the cluster.
        task_index: Number of the task in the job. By default the only one.
        protocol: `grpc`.
        config: Ignored with a warning, because there are no sessions. For `tf.distribute` programs.
        start: Whether to call `start`.
        start_timeout_s: Maximum seconds for which `start` waits for the program.

    Raises:
        TypeError: If `server_or_cluster_def` has another type.
        ValueError: If the cluster has no such task, if the task cannot be a server, or if the
            cluster has several hosts and no chief.

    Mirrors `tf.distribute.Server`, where programs connect to servers. Here servers connect to the
    program, so the cluster must have its address. A server runs until the program has ended.
    """

    def __init__(
        self,
        server_or_cluster_def: ServerDef | ClusterSpec | Mapping[str, Any],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: object = None,
        start: bool = True,
        *,
        start_timeout_s: float = 300.0,
    ):
        if config is not None:
            warnings.warn(
                f"Server(config={config!r}) has no effect, because there are no sessions.",
                stacklevel=2,
            )
        self._server_def = make_server_def(server_or_cluster_def, job_name, task_index, protocol)
        self._head = _find_head(self._server_def)
        self._start_timeout_s = start_timeout_s
        self._node: RayNode | None = None
        self._ending: weakref.finalize | None = None
        if start:
            self.start()

    def start(self) -> None:
        """Waits for the chief's program and joins it; has no effect after the first call.

        After `join`, it joins the next program at that address.

        Raises:
            ModuleNotFoundError: If Ray is not installed.
            RuntimeError: If there is no token, or tokens are disabled.
            TimeoutError: If the program does not start in time.
            ConnectionError: If the program rejects this machine.
        """
        if self._head is None or self._node is not None:
            return
        task = self._server_def
        self._node = RayNode(
            self._head,
            task.job_name,
            task.task_index,
            task.address,
            timeout_s=self._start_timeout_s,
        )
        # Also at exit: Ray's processes must not outlive this one.
        self._ending = weakref.finalize(self, self._node.close)

    def join(self) -> None:
        """Serves until the program has ended. Nothing of it remains on this machine.

        Mirrors `tf.distribute.Server.join`, which never returns.

        Raises:
            RuntimeError: If the server was not started, if it belongs to a program whose threads
                are its workers and servers, or if this machine was excluded from a program that
                still runs.
        """
        if self._head is None:
            raise RuntimeError(
                f"{self!r} belongs to a program whose threads are its workers and servers, so "
                f"there is nothing to wait for. To run them as processes, on this machine or on "
                f"others, add the job '{CHIEF_JOB}' to the cluster, with the address of the "
                f"program."
            )
        if self._node is None:
            raise RuntimeError(f"{self!r} was not started. Call start() before join().")
        try:
            self._node.join()
        finally:
            self._node = None
            if self._ending is not None:
                self._ending.detach()

    @property
    def server_def(self) -> ServerDef:
        """The cluster and the task of this server."""
        return self._server_def

    @property
    def target(self) -> str:
        """Address of the server in its cluster, such as `grpc://10.0.0.2:2222`.

        Ray uses this port if the server has joined a program; otherwise nothing listens there. A
        local server has port 0. There are no sessions that could connect.
        """
        return f"{self._server_def.protocol}://{self._server_def.address}"

    @staticmethod
    def create_local_server(config: object = None, start: bool = True) -> Server:
        """Returns a server of a cluster that is only this process; it opens no port.

        TensorFlow's local server has a port for sessions.

        Args:
            config: Ignored with a warning; see the class.
            start: Whether to call `start`.
        """
        return Server({"localhost": ["localhost:0"]}, protocol="grpc", config=config, start=start)

    def __repr__(self) -> str:
        return f"Server({self._server_def.job_name} {self._server_def.task_index}, {self.target})"


def _find_head(task: ServerDef) -> str | None:
    """Returns the address of the program; None if it is this process.

    Raises:
        ValueError: If the address is unknown, or the task is not a server of the program.
    """
    cluster = task.cluster
    # Without a chief, workers and servers are threads of the program, so no task may be elsewhere.
    if CHIEF_JOB not in cluster.jobs:
        other = find_other_host(cluster, cluster.jobs)
        if other is not None:
            job, index, address = other
            raise ValueError(
                f"The cluster has {job} {index} at {address}, which is another host, but no "
                f"'{CHIEF_JOB}'. Servers join the program that creates the "
                f"ParameterServerStrategy, and do not know where it runs. Add that job to the "
                f"cluster, with one address."
            )
        return None
    if task.job_name not in SERVER_JOBS:
        raise ValueError(
            f"A Server cannot be created for {task.job_name} {task.task_index}. Only the tasks of "
            f"{' and '.join(map(repr, SERVER_JOBS))} are servers. The program of the '{CHIEF_JOB}' "
            f"creates a tpudist.ParameterServerStrategy(cluster_resolver), which they join."
        )
    return cluster.task_address(CHIEF_JOB, 0)
