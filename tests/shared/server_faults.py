"""Workers and servers that are killed, whichever engine runs them; closures that wait for it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

from tpudist.context.closure_place import current_place
from tpudist.coordinator.cluster_coordinator import ClusterCoordinator
from tpudist.engine.ray.ray_engine import RayEngine
from tpudist.engine.thread_engine import ThreadEngine
from tpudist.strategies.parameter_server import ParameterServerStrategy

ENGINES = {"threads": ThreadEngine, "ray": RayEngine}


class Gate:
    """A gate at which closures of any process wait until a test opens it.

    Files, since a closure sees variables as they were when it first asked, and no change since.
    """

    def __init__(self, folder: Path):
        """Creates the gate in a new folder."""
        self.folder = folder / uuid.uuid4().hex
        self.folder.mkdir(parents=True)

    def wait_here(self) -> None:
        """Waits until the gate is open; for closures."""
        place = current_place()
        (self.folder / f"{place.worker}-{uuid.uuid4().hex}").touch()
        while not (self.folder / "open").exists():
            time.sleep(0.005)

    def come_here_once(self) -> None:
        """Waits if no other closure did before; for closures."""
        with contextlib.suppress(FileExistsError):
            (self.folder / "first").mkdir()
            self.wait_here()

    def open(self) -> None:
        """Opens the gate."""
        (self.folder / "open").touch()

    def workers(self) -> list[int]:
        """Workers that have arrived, once per arrival."""
        return sorted(int(x.name.split("-")[0]) for x in self.folder.glob("*-*"))

    def wait_for(self, count: int) -> list[int]:
        """Waits for `number` arrivals, and returns the workers."""
        wait_until(lambda: len(self.workers()) >= count, f"{count} closures at a gate")
        return self.workers()


class Cluster:
    """A strategy, its coordinator, and who may die."""

    def __init__(
        self,
        engine: str,
        *,
        num_workers: int = 2,
        num_servers: int = 2,
        log=None,
        server_timeout_s: float | None = 60.0,
        **options,
    ):
        """Starts workers and servers."""
        self.is_ray = engine == "ray"
        self.strategy = ParameterServerStrategy(
            engine=ENGINES[engine](),
            num_workers=num_workers,
            num_servers=num_servers,
            log=log,
            server_timeout_s=server_timeout_s,
        )
        self.engine = self.strategy.engine
        self.coordinator = ClusterCoordinator(self.strategy, **options)
        self._num_kills = 0

    def actor(self, role: str, index: int):
        """Returns the process with a role; None without one."""
        if role == "ps":
            return self.strategy.servers.actors[index]
        return self.coordinator._dispatcher._actors.get(index)

    def pid(self, actor, timeout_s: float = 60.0) -> int:
        """The process of an actor of Ray.

        Raises:
            ray.exceptions.RayError: If it is dead, or does not appear in time.
        """
        import ray

        return ray.get(self.engine._processes[actor], timeout=timeout_s).pid

    def kill(self, role: str, index: int, *, may_stop: bool = False) -> str | None:
        """Kills who is in a place: processes from outside, and by the engine, in turn.

        Args:
            role: Role of the actor.
            index: Number of the actor.
            may_stop: Whether every other process is stopped (SIGSTOP) rather than killed.

        Returns:
            How; None if there was nobody to kill.
        """
        actor = self.actor(role, index)
        if actor is None:
            return None
        self._num_kills += 1
        if self.is_ray and self._num_kills % 2:
            import ray

            try:
                how = signal.SIGSTOP if may_stop and self._num_kills % 4 == 1 else signal.SIGKILL
                os.kill(self.pid(actor, 10.0), how)
            except (KeyError, ProcessLookupError, ray.exceptions.RayError):
                return None  # dead, and not replaced yet
            return how.name
        self.engine.kill(actor, "for a test")
        return "engine.kill"


def wait_until(predicate, what: str, within_s: float = 60.0) -> None:
    """Until it holds.

    Raises:
        AssertionError: If it does not happen in time.
    """
    end_s = time.monotonic() + within_s
    while not predicate():
        assert time.monotonic() < end_s, f"{what}: not within {within_s:g} s"
        time.sleep(0.005)


def check_sums(line: dict) -> None:
    """Checks that every finished closure was either run by a worker or cancelled.

    Raises:
        AssertionError: A sample of progress does not add up.
    """
    workers, servers = line["workers"], line["servers"]
    assert line["done"] == sum(x["done"] for x in workers)
    assert line["failed"] == sum(x["failed"] for x in workers) == sum(line["errors"].values())
    assert line["done"] + line["failed"] + line["cancelled"] == line["finished"]
    assert sum(line["retries"].values()) == sum(x["retries"] for x in workers)
    assert line["in_flight"] == sum(x["state"] == "runs" for x in workers)
    assert [x["worker"] for x in workers] == sorted(x["worker"] for x in workers)
    assert [x["server"] for x in servers] == list(range(len(servers)))
