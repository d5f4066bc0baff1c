"""RayEngine: runs each actor as a process of Ray, on this machine or on others.

Values are copied, and received arrays may be read-only. Ray repeats nothing (`max_restarts=0`,
`max_task_retries=0`), because only the user of an engine knows what may be repeated. An actor that
Ray cannot reach, but does not know to be dead, is killed: its call may have run or not, and a later
call could overtake it.

See `ray_calls.py` for calls, `ray_host.py` for the processes, `ray_pickle.py` for messages, and
`ray_session.py` for Ray itself.
"""

from __future__ import annotations

import collections
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tpudist.engine.concurrency import Concurrency, SystemConcurrency
from tpudist.engine.engine import Actor, Serializer
from tpudist.engine.ray.ray_calls import END_S, PINGS, SHUTDOWN_CAUSE, RayCalls, RayFuture
from tpudist.engine.ray.ray_cluster import RayCluster
from tpudist.engine.ray.ray_host import Host, Process
from tpudist.engine.ray.ray_pickle import (
    RayRef,
    RaySerializer,
    explain_pickle_errors,
    put,
    unwrap_refs,
)
from tpudist.engine.ray.ray_session import RaySession, import_ray

RESOURCES = {
    "accelerator_type",
    "label_selector",
    "memory",
    "num_cpus",
    "num_gpus",
    "resources",
    "scheduling_strategy",
}
"""Ray's options of an actor that determine where it runs."""
_log = logging.getLogger("tpudist")


class RayEngine:
    """Runs actors as processes of Ray, from `start` on.

    If the program has called `ray.init`, its Ray is used and left as it is. Otherwise the engine
    joins a running Ray, or starts one on this machine in a temporary folder.

    Sent to an actor, an engine becomes a `RayMember`, with which the actor calls others.

    Args:
        address: Address of Ray, such as `10.0.0.1:6379`. By default RAY_ADDRESS; without that
            variable, Ray is started.
        cluster: Machines that join Ray by themselves (`tpudist.Server`), each for one actor. Ray is
            started here, and `start` waits for all of them.
        resources: Ray's resources of the actors of a role (see `RESOURCES`), such as
            `{"worker": {"num_cpus": 1}}`. By default none, so that they can run on any machine.
        environment: Environment variables of actors. By default the variables of JAX here (JAX_*,
            XLA_FLAGS, LIBTPU_INIT_ARGS), and this program's module folders.
        needs_token: Whether Ray must require a token. Without it, anybody who reaches Ray's ports
            can run code in your name.
        log_to_driver: Whether to print the output of actors here.

    Raises:
        ValueError: If `resources` has an unknown option, or both an address and a cluster are
            given.

    Attributes:
        concurrency: Threads and time of the operating system.
        serializer: Ray's serializer.
        actors_may_hang: True, because actors are processes.
    """

    serializer: Serializer | None = RaySerializer()
    actors_may_hang = True

    def __init__(
        self,
        address: str | None = None,
        *,
        cluster: RayCluster | None = None,
        resources: Mapping[str, Mapping[str, Any]] | None = None,
        environment: Mapping[str, str] | None = None,
        needs_token: bool = True,
        log_to_driver: bool = False,
    ):
        if address and cluster:
            raise ValueError(
                f"RayEngine(address={address!r}, cluster={cluster!r}): pass at most one of them. "
                f"address is the address of a running Ray; cluster is a cluster whose head starts "
                f"here."
            )
        for role, options in (resources or {}).items():
            if unknown := sorted(set(options) - RESOURCES):
                raise ValueError(
                    f"The resources of {role!r} have unknown names: {', '.join(unknown)}. Only "
                    f"these determine where an actor runs: {', '.join(sorted(RESOURCES))}."
                )
        self.concurrency: Concurrency = SystemConcurrency()
        self._resources = {role: dict(x) for role, x in (resources or {}).items()}
        self._environment = dict(environment or {})
        self._cluster = cluster
        self._session = RaySession(
            address,
            needs_token=needs_token,
            log_to_driver=log_to_driver,
            head=cluster and cluster.head,
        )
        secret = secrets.token_bytes(32)
        self._calls = RayCalls(f"tpudist-{secrets.token_hex(8)}", secret, self.concurrency)
        self._lock = threading.RLock()
        self._counts: collections.Counter[tuple[str, int]] = collections.Counter()
        self._processes: dict[Actor, Any] = {}  # ray.ObjectRef of a `Process`
        self._is_ready = self._is_over = False

    def start(self) -> None:
        """Starts Ray, or joins it.

        Raises:
            ModuleNotFoundError: If Ray is not installed.
            RuntimeError: If Ray does not start, or its tokens are disabled.
            ConnectionError: If Ray cannot be reached, or requires another token.
            TimeoutError: If a machine of the cluster does not join.
        """
        with self._lock:
            if self._is_over:
                raise RuntimeError("The engine was shut down. Create another engine.")
            if not self._is_ready:
                self._session.connect()
                if self._cluster is not None:
                    try:
                        self._cluster.wait()
                    except BaseException:
                        self._session.disconnect()
                        raise
                self._is_ready = True

    def spawn(self, role: str, index: int, factory: Callable[..., Any], *args: object) -> Actor:
        """Starts a process of Ray."""
        with self._lock:
            self.start()
            actor = Actor(role, index, self._counts[role, index])
            kind = import_ray().remote(concurrency_groups={PINGS: 1})(Host)
            host = kind.options(**self._options(actor))
            with explain_pickle_errors(f"the factory of {actor}", (factory, *args)):
                handle = host.remote(actor, self._calls.secret, factory, *unwrap_refs(args))
            self._counts[role, index] += 1
            # Requested now, because an actor that hangs could not answer when it must be killed.
            self._processes[actor] = handle.process.remote()
            self._calls.add(actor, handle)
        return actor

    def call(self, actor: Actor, method: str, *args: object) -> RayFuture:
        """Sends a call to the actor's process.

        Raises:
            TypeError: If an argument cannot be pickled.
        """
        return self._calls.call(actor, method, args)

    def result(self, future: RayFuture, timeout_s: float | None = None) -> Any:
        """Waits for the result of a call."""
        return self._calls.result(future, timeout_s)

    def ping(self, actor: Actor) -> RayFuture:
        """Pings an actor; a thread of its process answers that runs no calls."""
        return self._calls.ping(actor)

    def put(self, value: object) -> RayRef:
        """Puts a value into Ray's memory, which the processes of a machine share."""
        self.start()
        return put(value)

    def kill(self, actor: Actor, why: str = "it was killed") -> None:
        """Kills the actor's process, and waits until it is gone if it is on this machine."""
        self._calls.kill(actor, why)
        # Even if `RayCalls` has killed it before, which does not wait for its end.
        self._end_process(actor, time.monotonic() + END_S)

    def shutdown(self) -> None:
        """Ends all actors, and Ray if the engine started it."""
        with self._lock:
            self._is_over = True
        actors = list(self._processes)
        killed = [x for x in actors if self._calls.kill(x, SHUTDOWN_CAUSE)]
        end_s = time.monotonic() + END_S
        if not self._session.has_started_ray:  # otherwise all processes end with Ray
            for actor in killed:
                self._end_process(actor, end_s)
        self._processes.clear()  # a later `kill` must not call Ray, which would start it again
        self._calls.close()
        self._session.disconnect()

    def __reduce__(self) -> tuple:
        return RayMember, (self._calls.namespace, self._calls.secret)

    def _options(self, actor: Actor) -> dict[str, Any]:
        variables = {x: value for x, value in os.environ.items() if _is_of_jax(x)}
        variables["PYTHONPATH"] = os.pathsep.join(_module_folders())
        place = self._cluster.find_resources(actor.role, actor.index) if self._cluster else {}
        needs = {"num_cpus": 0, **self._resources.get(actor.role, {})}
        return {
            **needs,
            "resources": {**needs.get("resources", {}), **place},
            "name": str(actor),
            "namespace": self._calls.namespace,
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": variables | self._environment},
        }

    def _end_process(self, actor: Actor, end_s: float) -> None:
        """Waits for the end of a killed process on this machine, and kills it if it hangs."""
        # A process that hangs does not notice Ray's request, and Ray waits 5 s before it kills it.
        # `Process.end` waits only a moment before it does, because Ray prints a warning about a
        # process that dies before Ray has ended it.
        ray, reference = import_ray(), self._processes.pop(actor, None)
        if reference is None:
            return
        try:
            process: Process = ray.get(reference, timeout=0)
        except ray.exceptions.RayError:  # it has not started, or has died by itself
            return
        if process.node != ray.get_runtime_context().get_node_id():
            return
        if not process.end(end_s - time.monotonic()):
            _log.warning("The process %d of %s was killed, but still exists.", process.pid, actor)


class RayMember:
    """The engine in an actor: calls other actors, and neither starts nor ends any.

    Args:
        namespace: Namespace of the run.
        secret: Secret of the run's processes.

    Attributes:
        concurrency: Threads and time of the operating system.
        serializer: Ray's serializer.
        actors_may_hang: True, because actors are processes.
    """

    serializer: Serializer | None = RaySerializer()
    actors_may_hang = True

    def __init__(self, namespace: str, secret: bytes):
        self.concurrency: Concurrency = SystemConcurrency()
        self._calls = RayCalls(namespace, secret, self.concurrency)

    def start(self) -> None:
        """Does nothing, because Ray has started this process."""

    def spawn(self, role: str, index: int, factory: Callable[..., Any], *args: object) -> Actor:
        """Raises RuntimeError."""
        raise _not_allowed("spawn actors")

    def call(self, actor: Actor, method: str, *args: object) -> RayFuture:
        """Calls a method; see `RayEngine.call`."""
        return self._calls.call(actor, method, args)

    def result(self, future: RayFuture, timeout_s: float | None = None) -> Any:
        """Waits for a result; see `RayEngine.result`."""
        return self._calls.result(future, timeout_s)

    def ping(self, actor: Actor) -> RayFuture:
        """Pings an actor; see `RayEngine.ping`."""
        return self._calls.ping(actor)

    def put(self, value: object) -> RayRef:
        """Puts a value into Ray's memory, as long as this actor lives."""
        return put(value)

    def kill(self, actor: Actor, why: str = "it was killed") -> None:
        """Raises RuntimeError."""
        raise _not_allowed("kill actors")

    def shutdown(self) -> None:
        """Raises RuntimeError."""
        raise _not_allowed("be shut down")

    def __reduce__(self) -> tuple:
        return RayMember, (self._calls.namespace, self._calls.secret)


def _not_allowed(action: str) -> RuntimeError:
    return RuntimeError(
        f"An engine in an actor cannot {action}. Do this in the process that started the engine."
    )


def _module_folders() -> list[str]:
    """Returns the folders in which this program finds modules that are not installed."""
    installed = {os.path.realpath(x) for x in (sys.prefix, sys.base_prefix)}
    folders = [os.path.realpath(x) for x in sys.path if os.path.isdir(x or ".")]
    return [x for x in dict.fromkeys(folders) if not any(x.startswith(f"{y}/") for y in installed)]


def _is_of_jax(variable: str) -> bool:
    return variable.startswith("JAX_") or variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
