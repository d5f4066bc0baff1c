"""Server: this machine as a worker or a parameter server of a program that runs elsewhere."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from tpudist.cluster_resolver.server_def import ServerDef, find_other_host, make_server_def
from tpudist.engine.ray.ray_node import RayNode

PROGRAM = "chief"
"""The job of the program that schedules."""
JOBS = ("worker", "ps")
"""The jobs of the machines that it has."""


class Server:
    """One task of a cluster, which a program with a `tpudist.ParameterServerStrategy` makes use of.

    Where the cluster has the job `chief`, this machine joins the Ray that the program of the chief
    starts at its address, and that worker or server of the strategy which the task is runs here
    (`pip install 'tpudist[ray]'`). All of it ends with this process, however that ends, or when
    the program has ended. Every machine needs the same token, in RAY_AUTH_TOKEN, in the file
    RAY_AUTH_TOKEN_PATH, or in ~/.ray/auth_token: whoever has it may run code here.

    Where a cluster has no chief, and all of it is on this machine, workers and servers are threads
    of the program that makes the strategy: there is nothing to join, and the object only says what
    it was given.

    As `tf.distribute.Server`. There programs connect to servers; here servers connect to the
    program, so it must have an address in the cluster. Each serves until that program has ended,
    and there is no session that could have a `config`.
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
        *,
        start_timeout_s: float = 300.0,
    ):
        """Starts the server, unless told otherwise.

        Args:
            server_or_cluster_def: The cluster, as a `tpudist.cluster_resolver.ClusterSpec` or a
                dict of jobs, or a `tpudist.cluster_resolver.ServerDef`. What the next arguments say
                goes before what that one says.
            job_name: `worker` or `ps`. By default the only job of the cluster.
            task_index: Which of the job. By default the only one.
            protocol: `grpc`.
            config: For `tf.distribute`: there are no sessions.
            start: Whether to `start` at once.
            start_timeout_s: How long `start` waits for the program.

        Raises:
            TypeError: The first argument is neither.
            ValueError: Such a task is not in the cluster, or cannot be a server; or the cluster has
                several hosts and no chief.
        """
        if config is not None:
            warnings.warn(
                f"Server(config={config!r}) has no effect, because there are no sessions.",
                stacklevel=2,
            )
        self._server_def = make_server_def(server_or_cluster_def, job_name, task_index, protocol)
        self._head = _find_head(self._server_def)
        self._start_timeout_s = start_timeout_s
        self._node: RayNode | None = None
        self._ending: Any = None
        if start:
            self.start()

    def start(self) -> None:
        """Joins the program of the chief, for which it waits; may be called again.

        After `join` it serves the next program at that address.

        Raises:
            ModuleNotFoundError: Ray is not installed.
            RuntimeError: There is no token, or tokens are off.
            TimeoutError: The program does not start in time.
            ConnectionError: It lets this machine not join.
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
        self._ending = weakref.finalize(self, self._node.close)

    def join(self) -> None:
        """Serves until the program has ended; then nothing is left here.

        In TensorFlow it never returns.

        Raises:
            RuntimeError: The server was not started, or there is nothing to wait for since it is
                part of a program; or this machine is no longer part of one that runs.
        """
        if self._head is None:
            raise RuntimeError(
                f"{self!r} belongs to a program whose threads are its workers and servers, so "
                f"there is nothing to wait for. To run them as processes, on this machine or on "
                f"others, add the job '{PROGRAM}' to the cluster, with the address of the program."
            )
        if self._node is None:
            raise RuntimeError(f"{self!r} was not started. Call start() before join().")
        try:
            self._node.join()
        finally:
            self._node = None
            self._ending.detach()

    @property
    def server_def(self) -> ServerDef:
        """Which task of which cluster this is."""
        return self._server_def

    @property
    def target(self) -> str:
        """The address of the server in its cluster, such as `grpc://10.0.0.2:2222`.

        Ray takes calls at its port if the server has joined a program, and nobody does otherwise:
        the port of a local server is 0. There are no sessions that could connect to it.
        """
        return f"{self._server_def.protocol}://{self._server_def.address}"

    @staticmethod
    def create_local_server(config: Any = None, start: bool = True) -> Server:
        """A server of a cluster that is this process only; it listens to nobody.

        In TensorFlow it has a port of its own, for sessions.

        Args:
            config: For `tf.distribute`: there are no sessions.
            start: Whether to start it at once.
        """
        return Server({"localhost": ["localhost:0"]}, protocol="grpc", config=config, start=start)

    def __repr__(self) -> str:
        return f"Server({self._server_def.job_name} {self._server_def.task_index}, {self.target})"


def _find_head(task: ServerDef) -> str | None:
    """Where the program is; None if it is this one.

    Raises:
        ValueError: That is not known, or the task is no server of it.
    """
    cluster = task.cluster
    if PROGRAM not in cluster.jobs:
        other = find_other_host(cluster, cluster.jobs)
        if other is not None:
            job, index, address = other
            raise ValueError(
                f"The cluster has {job} {index} at {address}, which is another host, but no "
                f"'{PROGRAM}'. Servers join the program that creates the ParameterServerStrategy, "
                f"and do not know where it runs. Add that job to the cluster, with one address."
            )
        return None
    if task.job_name not in JOBS:
        raise ValueError(
            f"A Server cannot be created for {task.job_name} {task.task_index}. Only the tasks of "
            f"{' and '.join(map(repr, JOBS))} are servers. The program of the '{PROGRAM}' creates "
            f"a tpudist.ParameterServerStrategy(cluster_resolver), which they join."
        )
    return cluster.task_address(PROGRAM, 0)
