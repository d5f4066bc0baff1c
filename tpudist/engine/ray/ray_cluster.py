"""RayCluster: machines that join the Ray of a program, each for one named actor.

A machine provides one resource, `tpudist:<role>:<index>`, and the actor with that role and index
runs there. So the start of machines decides where actors run, and a machine that returns gets its
actor again.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from tpudist.engine.ray.ray_session import import_ray
from tpudist.options.member_names import format_members

_REPORT_S = 10.0  # between two reports of missing machines
_STEP_S = 1  # Ray waits for whole seconds, and Ctrl-C is noticed after a wait
_log = logging.getLogger("tpudist")


class PlacementGroup(Protocol):
    """`ray.util.placement_group.PlacementGroup`."""

    def wait(self, timeout_seconds: int) -> bool:
        """Waits until the resources are reserved; returns whether they are."""
        ...


@dataclasses.dataclass(frozen=True)
class RayCluster:
    """The machines of a program.

    Attributes:
        head: Address `host:port` at which the program starts Ray for the others.
        machines: Role and index of each machine.
        wait_s: Maximum seconds for which the program waits for them.
    """

    head: str
    machines: frozenset[tuple[str, int]]
    wait_s: float = 300.0

    def find_resources(self, role: str, index: int) -> dict[str, float]:
        """Returns the resource that places an actor on its machine; empty if it has none."""
        return {name_resource(role, index): 1.0} if (role, index) in self.machines else {}

    def wait(self) -> None:
        """Waits until all machines have joined.

        Raises:
            TimeoutError: If machines are missing; the message names them.
        """
        util = import_ray().util
        # A placement group that gets its resource shows that the machine has joined, and starts
        # nothing there.
        groups = {
            f"{role} {index}": util.placement_group([{name_resource(role, index): 1.0}])
            for role, index in sorted(self.machines)
        }
        try:
            self._wait_for(groups)
        finally:
            for group in groups.values():
                util.remove_placement_group(group)

    def _wait_for(self, groups: Mapping[str, PlacementGroup]) -> None:
        start = reported = time.monotonic()
        missing = collections.deque(groups)
        while missing:
            # Ray can wait for one group only. The limit may be exceeded by one step.
            if groups[missing[0]].wait(_STEP_S):
                missing.popleft()
                continue
            missing.rotate(-1)
            now = time.monotonic()
            if now - start > self.wait_s:
                raise TimeoutError(
                    f"{_list_machines(missing)} of {len(groups)} servers did not join the "
                    f"program at {self.head} within {self.wait_s:g} s. Run "
                    f"tpudist.Server(cluster_spec, job_name, task_index).join() on each of them, "
                    f"with the same RAY_AUTH_TOKEN, and check that they can reach that address."
                )
            if now - reported > _REPORT_S:
                _log.warning("Waiting for servers to join: %s.", _list_machines(missing))
                reported = now


def _list_machines(names: Iterable[str]) -> str:
    """Returns the names of machines, such as "ps 0, workers 0-7"."""
    numbers: dict[str, list[int]] = {}
    for role, number in sorted(name.split() for name in names):
        numbers.setdefault(role, []).append(int(number))
    return ", ".join(format_members(role, x) for role, x in numbers.items())


def name_resource(role: str, index: int) -> str:
    """Returns the name of the resource that only the machine of an actor has."""
    return f"tpudist:{role}:{index}"
