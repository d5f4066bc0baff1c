"""Runs the elements of one pass ahead of the loop: as far as the devices, or in host memory."""

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from tpudist.array_types import PyTree
from tpudist.input.iterator_state import Position
from tpudist.input.process_rounds import Rounds
from tpudist.input.transfer import to_devices
from tpudist.input.transfer.prefetch import Prefetcher
from tpudist.input.transfer.to_devices import Parts
from tpudist.xla.mesh import ReplicaMesh

_stops: "weakref.WeakSet[threading.Event]" = weakref.WeakSet()


class Element(NamedTuple):
    """An element on the devices, and what the source of it says of where it is afterwards."""

    value: PyTree
    state: Any


class Feed(Protocol):
    """What gives the elements of a dataset in host memory."""

    cardinality: Any
    element_spec: Any
    plan: Any

    any_thread: bool
    """Whether one pass may be run by several threads in turn, and never takes long."""

    def host_parts(
        self, position: Position, *, keep: bool, rounds: Rounds | None
    ) -> Iterator[tuple[Parts, Any]]:
        """The parts of one pass from `position`, each with the state after it."""
        ...


class Elements(Iterator[Element]):
    """The elements of one pass; nothing is read before the first is asked for."""

    def __init__(
        self,
        feed: Feed,
        replica_mesh: ReplicaMesh,
        position: Position,
        *,
        prefetch: int,
        fetch_to_device: bool,
        name: Callable[[], str],
    ):
        """From `position` on.

        Args:
            feed: Gives them in host memory.
            replica_mesh: The devices.
            position: Where to begin.
            prefetch: How many to make ahead; 0 for each when it is asked for.
            fetch_to_device: Whether those wait on the devices.
            name: Gives a name, by which all processes call this pass.
        """
        self.position = position
        stop = threading.Event()
        _stops.add(stop)
        several = replica_mesh.num_processes > 1
        rounds = Rounds(name, stop, replica_mesh.processes) if several else None
        wait_on_host = prefetch > 0 and not fetch_to_device
        parts = feed.host_parts(position, keep=wait_on_host, rounds=rounds)
        any_thread = feed.any_thread and rounds is None

        def begin() -> Iterator[Element]:
            if wait_on_host:
                return _PlacedParts(replica_mesh, Prefetcher(parts, prefetch))
            placed = _PlacedParts(replica_mesh, parts)
            if not prefetch:
                return placed
            return Prefetcher(placed, prefetch, any_thread=any_thread)

        self._begin: Callable[[], Iterator[Element]] | None = begin
        self._elements: Iterator[Element] = iter(())
        self._stop = stop
        weakref.finalize(self, stop.set)  # a thread may be waiting for other processes

    def __next__(self) -> Element:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self._elements = begin()
        return next(self._elements)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has been read, nor asked for."""
        return self._begin is not None

    def close(self) -> None:
        """Ends the pass, and the thread with the batch it is at."""
        self._stop.set()
        elements, self._begin, self._elements = self._elements, None, iter(())
        if isinstance(elements, Prefetcher | _PlacedParts):
            elements.close()


class _PlacedParts(Iterator[Element]):
    """Parts in host memory, put on the devices when they are asked for."""

    def __init__(self, replica_mesh: ReplicaMesh, parts: Iterator[tuple[Parts, Any]]):
        self._mesh = replica_mesh
        self._parts = parts

    def __next__(self) -> Element:
        parts, state = next(self._parts)
        return Element(to_devices.place(self._mesh, parts), state)

    def close(self) -> None:
        if isinstance(self._parts, Prefetcher):
            self._parts.close()
        self._parts = iter(())


@atexit.register  # later than that of `prefetch`, and so called before it, which waits for threads
def _stop_all() -> None:
    for stop in list(_stops):
        stop.set()
