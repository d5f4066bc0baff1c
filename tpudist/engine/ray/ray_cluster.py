"""RayCluster: machines that join the Ray of a program by themselves, each for one actor by name.

A machine brings one resource, `tpudist:<role>:<index>`, and the actor of that role and index runs
where it is. So whoever starts the machines decides what runs where, and one that comes back gets
its actor back.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from typing import Any

from tpudist.engine.ray.ray_session import import_ray

_REPORT_S = 10.0
_STEP_S = 1  # a Ctrl-C is heard so late
_log = logging.getLogger("tpudist")


@dataclasses.dataclass(frozen=True)
class RayCluster:
    """Who takes part.

    Attributes:
        head: Where the program starts Ray for the others to join, `host:port`.
        machines: The role and the index of each machine that joins.
        wait_s: How long the program waits for them.
    """

    head: str
    machines: frozenset[tuple[str, int]]
    wait_s: float = 300.0

    def find_resources(self, role: str, index: int) -> dict[str, float]:
        """What an actor needs to be on its machine; nothing if it has none."""
        return {name_resource(role, index): 1.0} if (role, index) in self.machines else {}

    def wait(self) -> None:
        """Waits until all machines have joined.

        Raises:
            TimeoutError: Some have not in time; says which.
        """
        util = import_ray().util
        # Room that is set aside on a machine shows that it is there, and starts nothing on it.
        rooms = {
            f"{role} {index}": util.placement_group([{name_resource(role, index): 1.0}])
            for role, index in sorted(self.machines)
        }
        try:
            self._wait_for(rooms)
        finally:
            for room in rooms.values():
                util.remove_placement_group(room)

    def _wait_for(self, rooms: dict[str, Any]) -> None:
        began = reported = time.monotonic()
        missing = collections.deque(rooms)
        while missing:
            # One after the other: Ray waits for whole seconds, and not for one that is there.
            if rooms[missing[0]].wait(_STEP_S):
                missing.popleft()
                continue
            missing.rotate(-1)
            now = time.monotonic()
            if now - began > self.wait_s:
                raise TimeoutError(
                    f"{', '.join(sorted(missing))} of {len(rooms)} servers did not join the "
                    f"program at {self.head} within {self.wait_s:g} s. Run "
                    f"tpudist.Server(cluster_spec, job_name, task_index).join() on each of them, "
                    f"with the same RAY_AUTH_TOKEN, and check that they can reach that address."
                )
            if now - reported > _REPORT_S:
                _log.warning("Waiting for servers to join: %s.", ", ".join(sorted(missing)))
                reported = now


def name_resource(role: str, index: int) -> str:
    """What the machine of an actor has, and no other one."""
    return f"tpudist:{role}:{index}"
