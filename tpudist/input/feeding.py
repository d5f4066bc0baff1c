"""Runs the elements of one pass ahead of the loop: as far as the devices, or in host memory."""

from collections.abc import Iterator
from typing import Any

from tpudist.input import placing
from tpudist.input.agreement import AgreedElements
from tpudist.input.pipelines import Pipelines
from tpudist.input.placing import Parts
from tpudist.input.prefetch import Prefetcher
from tpudist.input.split import SplitBatches
from tpudist.xla.mesh import ReplicaMesh

PyTree = Any


def elements(
    feed: SplitBatches | Pipelines,
    replica_mesh: ReplicaMesh,
    pass_number: int,
    *,
    prefetch: int,
    fetch_to_device: bool,
) -> Iterator[PyTree]:
    """The elements of one pass on the devices.

    Args:
        feed: Gives them in host memory.
        replica_mesh: The devices.
        pass_number: Which pass.
        prefetch: How many to make ahead; 0 for each when it is asked for.
        fetch_to_device: Whether those wait on the devices.

    Returns:
        An iterator that ends its thread when it is closed or dropped.
    """
    if isinstance(feed, Pipelines) and feed.needs_agreement:
        steps = feed.steps(pass_number)
        ahead = Prefetcher(steps, prefetch) if prefetch else steps
        return AgreedElements(feed, replica_mesh, ahead)
    wait_on_host = prefetch > 0 and not fetch_to_device
    parts = feed.host_parts(pass_number, keep=wait_on_host)
    if wait_on_host:
        return _Placed(replica_mesh, Prefetcher(parts, prefetch))
    placed = _Placed(replica_mesh, parts)
    return Prefetcher(placed, prefetch) if prefetch else placed


class _Placed(Iterator[PyTree]):
    """Parts in host memory, put on the devices when they are asked for."""

    def __init__(self, replica_mesh: ReplicaMesh, parts: Iterator[Parts]):
        self._mesh = replica_mesh
        self._parts = parts

    def __next__(self) -> PyTree:
        return placing.place(self._mesh, next(self._parts))

    def close(self) -> None:
        if isinstance(self._parts, Prefetcher):
            self._parts.close()
        self._parts = iter(())
