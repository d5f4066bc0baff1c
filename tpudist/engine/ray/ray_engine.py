"""The engine over Ray: each actor is a process, on this machine or on others.

Values are copied, and arrays that were sent may be read only. Ray is asked to repeat nothing
(`max_restarts=0`, `max_task_retries=0`): who uses an engine knows what may be repeated.

An actor that Ray cannot reach, but does not know to be dead, is killed and has died: its call may
have run or not, and a later one could overtake it.

Calls: `ray_calls.py`; what runs there: `ray_host.py`; what is sent and comes back:
`ray_pickle.py`; Ray itself: `ray_session.py`.
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
from tpudist.engine.ray.ray_calls import END_S, OVER, PINGS, Calls, RayFuture
from tpudist.engine.ray.ray_cluster import RayCluster
from tpudist.engine.ray.ray_host import Host, Process
from tpudist.engine.ray.ray_pickle import (
    RayRef,
    RaySerializer,
    name_what_cannot_be_pickled,
    put,
    references,
)
from tpudist.engine.ray.ray_session import RaySession, import_ray

RESOURCES = frozenset(
    "accelerator_type label_selector memory num_cpus num_gpus resources scheduling_strategy".split()
)
"""Ray's options of an actor that say where it runs."""
_log = logging.getLogger("tpudist")


class RayEngine:
    """Runs actors as processes of Ray.

    Sent to an actor it becomes a `RayMember`, with which the actor calls others.

    Attributes:
        concurrency: Threads and time of the system.
        serializer: That of Ray.
        actors_may_hang: True: they are processes.
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
        """Nothing runs before `start`.

        Where the program has called `ray.init`, its Ray is used and left as it is. Else Ray is
        started on this machine, in a folder that goes with it, or joined where it runs.

        Args:
            address: Of Ray, such as `10.0.0.1:6379`. By default that of the variable RAY_ADDRESS;
                where there is none, Ray is started.
            cluster: Machines that join Ray by themselves (`tpudist.Server`), each for one actor.
                Ray is started here for them, and `start` waits until all of them are there.
            resources: What actors of a role need, in Ray's words (see `RESOURCES`), such as
                `{"worker": {"num_cpus": 1}}`. By default nothing, so that any machine can hold
                them.
            environment: Variables of actors. By default those that JAX reads here (JAX_*,
                XLA_FLAGS, LIBTPU_INIT_ARGS), and where this program finds its modules.
            needs_token: Whether Ray must refuse who has no token. Who can reach Ray's ports may
                otherwise run code in your name.
            log_to_driver: Whether what actors print is printed here.

        Raises:
            ValueError: An option in `resources` says something else; or an address and a cluster.
        """
        if address and cluster:
            raise ValueError(
                f"RayEngine(address={address!r}, cluster={cluster!r}): pass exactly one of them. "
                f"address is the address of a running Ray; cluster is a cluster whose head starts "
                f"here."
            )
        for role, options in (resources or {}).items():
            if strange := sorted(set(options) - RESOURCES):
                raise ValueError(
                    f"The resources of {role!r} have unknown names: {', '.join(strange)}. Only "
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
        self._calls = Calls(f"tpudist-{secrets.token_hex(8)}", secret, self.concurrency)
        self._lock = threading.RLock()
        self._counts: collections.Counter[tuple[str, int]] = collections.Counter()
        self._processes: dict[Actor, Any] = {}  # references of what `Host.process` gives
        self._is_ready = self._is_over = False

    def start(self) -> None:
        """Starts Ray, or joins it.

        Raises:
            ModuleNotFoundError: Ray is not installed.
            RuntimeError: It does not start, or its tokens are off.
            ConnectionError: It cannot be reached, or wants another token.
            TimeoutError: A machine of the cluster does not join.
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

    def spawn(self, role: str, index: int, factory: Callable[..., Any], *args: Any) -> Actor:
        """Has Ray start a process."""
        with self._lock:
            self.start()
            actor = Actor(role, index, self._counts[role, index])
            kind = import_ray().remote(concurrency_groups={PINGS: 1})(Host)
            host = kind.options(**self._options(actor))
            with name_what_cannot_be_pickled(f"the factory of {actor}", (factory, *args)):
                handle = host.remote(actor, self._calls.secret, factory, *references(args))
            self._counts[role, index] += 1
            # Asked for at once, so that it is known when the actor is to be killed.
            self._processes[actor] = handle.process.remote()
            self._calls.add(actor, handle)
        return actor

    def call(self, actor: Actor, method: str, *args: Any) -> RayFuture:
        """Sends a message to the actor's process.

        Raises:
            TypeError: An argument cannot be pickled.
        """
        return self._calls.call(actor, method, args)

    def result(self, future: RayFuture, timeout_s: float | None = None) -> Any:
        """Waits for Ray to have what the method has given."""
        return self._calls.result(future, timeout_s)

    def ping(self, actor: Actor) -> RayFuture:
        """Has another thread of the process answer than the one that runs its calls."""
        return self._calls.ping(actor)

    def put(self, value: Any) -> RayRef:
        """Puts a value into Ray's memory, which the processes of a machine share."""
        self.start()
        return put(value)

    def kill(self, actor: Actor, why: str = "it was killed") -> None:
        """Ends an actor's process, and waits until it is gone if it is on this machine."""
        self._calls.kill(actor, why)
        # Also if it was killed before because it could not be reached: then nobody has waited.
        self._end_process(actor, time.monotonic() + END_S)

    def shutdown(self) -> None:
        """Ends all actors, and Ray if the engine has started it."""
        with self._lock:
            self._is_over = True
        actors = list(self._processes)
        killed = [x for x in actors if self._calls.kill(x, OVER)]
        end_s = time.monotonic() + END_S
        if not self._session.has_started_ray:  # else all of its processes end
            for actor in killed:
                self._end_process(actor, end_s)
        self._calls.close()
        self._session.disconnect()

    def __reduce__(self) -> tuple:
        """For actors."""
        return RayMember, (self._calls.namespace, self._calls.secret)

    # Within.

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
        """Sees to the end of a process that Ray was asked to kill, if it is on this machine.

        One that hangs does not hear Ray, which gives it 5 s; so it is killed from here as well. Not
        at once: Ray would print that a process has died that nobody asked to.
        """
        ray, reference = import_ray(), self._processes.pop(actor, None)
        if reference is None:
            return
        try:
            process: Process = ray.get(reference, timeout=0)
        except ray.exceptions.RayError:  # it has not begun to live, or has died by itself
            return
        if process.node != ray.get_runtime_context().get_node_id():
            return
        if not process.end(end_s - time.monotonic()):
            _log.warning("The process %d of %s was killed, but still exists.", process.pid, actor)


class RayMember:
    """The engine as an actor has it, which calls others and neither starts nor ends any.

    Attributes:
        concurrency: Threads and time of the system.
        serializer: That of Ray.
        actors_may_hang: True: they are processes.
    """

    serializer: Serializer | None = RaySerializer()
    actors_may_hang = True

    def __init__(self, namespace: str, secret: bytes):
        """Of the run with a namespace, whose processes know a secret."""
        self.concurrency: Concurrency = SystemConcurrency()
        self._calls = Calls(namespace, secret, self.concurrency)

    def start(self) -> None:
        """Nothing is to be done: Ray has started this process."""

    def spawn(self, role: str, index: int, factory: Callable[..., Any], *args: Any) -> Actor:
        """Refuses."""
        raise _refuse("spawn actors")

    def call(self, actor: Actor, method: str, *args: Any) -> RayFuture:
        """As `RayEngine.call`."""
        return self._calls.call(actor, method, args)

    def result(self, future: RayFuture, timeout_s: float | None = None) -> Any:
        """As `RayEngine.result`."""
        return self._calls.result(future, timeout_s)

    def ping(self, actor: Actor) -> RayFuture:
        """As `RayEngine.ping`."""
        return self._calls.ping(actor)

    def put(self, value: Any) -> RayRef:
        """As `RayEngine.put`; the value lives as long as this actor."""
        return put(value)

    def kill(self, actor: Actor, why: str = "it was killed") -> None:
        """Refuses."""
        raise _refuse("kill actors")

    def shutdown(self) -> None:
        """Refuses."""
        raise _refuse("be shut down")

    def __reduce__(self) -> tuple:
        """For other actors."""
        return RayMember, (self._calls.namespace, self._calls.secret)


def _refuse(what: str) -> RuntimeError:
    return RuntimeError(
        f"An engine in an actor cannot {what}. Do this in the process that started the engine."
    )


def _module_folders() -> list[str]:
    """Where this program finds modules, but for what comes with Python or is installed."""
    installed = {os.path.realpath(x) for x in (sys.prefix, sys.base_prefix)}
    folders = [os.path.realpath(x) for x in sys.path if os.path.isdir(x or ".")]
    return [x for x in dict.fromkeys(folders) if not any(x.startswith(f"{y}/") for y in installed)]


def _is_of_jax(variable: str) -> bool:
    return variable.startswith("JAX_") or variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
