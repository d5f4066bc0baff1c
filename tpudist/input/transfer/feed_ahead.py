"""Prepares the elements of one pass ahead of the loop, on the devices or in host memory."""

import atexit
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, Protocol, TypeAlias

from tpudist.array_types import PyTree
from tpudist.input.iterator_state import Position, State, UnreadState
from tpudist.input.process_rounds import Rounds
from tpudist.input.transfer import to_devices
from tpudist.input.transfer.prefetch import Prefetcher
from tpudist.input.transfer.to_devices import Parts
from tpudist.processes import process_agreement
from tpudist.xla.mesh import ReplicaMesh

_stops: "weakref.WeakSet[threading.Event]" = weakref.WeakSet()


class Element(NamedTuple):
    """An element on the devices, and the state of its source after it."""

    value: PyTree
    state: State | UnreadState


# The parts of one pass, each with the state after it. Closing it ends the threads that read ahead.
PartsOfPass: TypeAlias = Generator[tuple[Parts, State | UnreadState], None, None]


class Feed(Protocol):
    """A feed, which returns the elements of a dataset in host memory.

    Attributes:
        may_run_in_loop: Whether the loop's thread may make elements, too: they are quick, and no
            process waits for another in them.
    """

    may_run_in_loop: bool

    def host_parts(self, position: Position, *, keep: bool, rounds: Rounds | None) -> PartsOfPass:
        """Returns the parts of one pass from `position`, each with the state after it."""
        ...


class Elements(Iterator[Element]):
    """The elements of one pass. Nothing is read before the first `next`.

    Args:
        feed: Feed that returns the elements in host memory.
        replica_mesh: The replicas.
        position: Position at which the pass begins.
        prefetch: Number of elements to prepare ahead; 0 prepares each in `next`.
        fetch_to_device: Whether prepared elements wait on the devices, or in host memory.
        name: Called without arguments; returns the name of this pass in all processes.
    """

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
        self.position = position
        stop = threading.Event()
        _stops.add(stop)
        rounds = None
        if process_agreement.has_others(replica_mesh):
            rounds = Rounds(name, stop, replica_mesh.processes, reads_ahead=prefetch > 0)
        wait_on_host = prefetch > 0 and not fetch_to_device
        self._parts = parts = feed.host_parts(position, keep=wait_on_host, rounds=rounds)
        may_run_in_loop = feed.may_run_in_loop and rounds is None

        def begin() -> Iterator[Element]:
            if wait_on_host:
                return _PlacedParts(replica_mesh, Prefetcher(parts, prefetch))
            placed = _PlacedParts(replica_mesh, parts)
            if not prefetch:
                return placed
            return Prefetcher(placed, prefetch, may_run_in_loop=may_run_in_loop)

        self._begin: Callable[[], Iterator[Element]] | None = begin
        self._elements: Iterator[Element] = iter(())
        self._stop = stop
        # If the loop drops this object, its thread may be waiting for other processes. Also at
        # exit, which does no harm: `_stop_all` does the same.
        weakref.finalize(self, stop.set)

    def __next__(self) -> Element:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self._elements = begin()
        return next(self._elements)

    @property
    def is_untouched(self) -> bool:
        """Whether no element has been requested."""
        return self._begin is not None

    def close(self) -> None:
        """Ends the pass. Its thread ends after the batch that it is reading."""
        self._stop.set()
        elements, self._begin, self._elements = self._elements, None, iter(())
        if isinstance(elements, Prefetcher | _PlacedParts):
            elements.close()
        self._parts.close()


class _PlacedParts(Iterator[Element]):
    """Elements that are copied to the devices in `next`."""

    def __init__(
        self, replica_mesh: ReplicaMesh, parts: Iterator[tuple[Parts, State | UnreadState]]
    ):
        self._mesh = replica_mesh
        self._parts = parts

    def __next__(self) -> Element:
        parts, state = next(self._parts)
        return Element(to_devices.place(self._mesh, parts), state)

    def close(self) -> None:
        if isinstance(self._parts, Prefetcher):
            self._parts.close()
        self._parts = iter(())


# Functions at exit run in reverse order. This one is registered after that of `prefetch`, so it
# runs before: the threads for which that one waits must not wait for other processes.
@atexit.register
def _stop_all() -> None:
    for stop in list(_stops):
        stop.set()
