"""Worker: runs closures one after the other, as an actor of an engine.

Its caller is the `Dispatcher`, possibly from another process. A worker decides nothing about
retries: it reports a result, an error of the function, or the loss of a server.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from tpudist.array_types import PyTree
from tpudist.context.closure_place import ClosurePlace, current_place, enter_closure
from tpudist.coordinator.remote_value import map_nest
from tpudist.coordinator.worker_iterator import WorkerIterator
from tpudist.engine.engine import Actor, ActorDied
from tpudist.ps.server_variable import read_now
from tpudist.ps.worker_session import WorkerSession


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """State of the run at the moment when a closure starts.

    Attributes:
        low: All closures with lower numbers have finished.
        servers: Actors that hold the variables now.
        read_ahead_limit: Closures with lower numbers were scheduled before this one started. Values
            for one of them may be fetched early, at the end of this closure: their program cannot
            expect to see any later update. None if nothing should be fetched.
    """

    low: int = 0
    servers: tuple[Actor, ...] = ()
    read_ahead_limit: int | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """Result of a closure.

    Attributes:
        value: Return value of the function.
        staleness: Number of other closures that had changed the variables between the read and the
            update of this one; None if it updated nothing that it had read.
        positions: Positions of the iterators that it used, by resource key.
    """

    value: PyTree
    staleness: int | None
    positions: Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class ResourceRef:
    """Stands, among the arguments of a closure, for the worker's own resource with this key."""

    key: int


class Worker:
    """Runs functions on one device, and keeps the resources that they share.

    Args:
        index: Number of the worker.
        device: Default device of its functions; None for JAX's default.
        make_session: Called with the number; returns the session of a strategy with servers. None
            without such a strategy.
    """

    def __init__(
        self,
        index: int,
        device: jax.Device | None = None,
        make_session: Callable[[int], WorkerSession] | None = None,
    ):
        self._index, self._device = index, device
        self._session = None if make_session is None else make_session(index)
        self._resources: dict[int, Any] = {}

    def create_resource(
        self,
        key: int,
        fn: Callable[..., Any],
        args: Sequence[Any],
        position: int | None = None,
    ) -> None:
        """Stores `fn(*args)` under a key. An error of `fn` is raised by closures that use the key.

        Args:
            key: Key of the resource.
            fn: Function that creates it.
            args: Arguments of `fn`.
            position: Position from which an iterator continues, if it replaces one of a lost
                worker.
        """
        try:
            with self._enter(ClosurePlace(self._index, closure=None, session=self._session)):
                resource = self._resources[key] = fn(*args)
                if position is not None and isinstance(resource, WorkerIterator):
                    resource.go_to(position)
        except ActorDied:  # A server was lost. The dispatcher waits for its successor, and retries.
            self.delete_resource(key)
            raise
        except Exception as error:
            self._resources[key] = _Failure(error)

    def delete_resource(self, key: int) -> None:
        """Deletes a resource, if it exists."""
        self._resources.pop(key, None)

    def positions(self) -> dict[int, int]:
        """Returns the positions of all iterators, by resource key."""
        resources = self._resources.items()
        return {key: x.position for key, x in resources if isinstance(x, WorkerIterator)}

    def run(
        self,
        number: int,
        status: RunStatus,
        fn: Callable[..., PyTree] | ResourceRef,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Completion:
        """Calls a function, and returns when its value is computed and its updates are applied."""
        iterators: dict[int, WorkerIterator] = {}

        def resolve(x: Any) -> Any:
            if not isinstance(x, ResourceRef):
                return x
            resource = self._resources[x.key]
            if isinstance(resource, _Failure):
                raise resource.as_new()
            if isinstance(resource, WorkerIterator):
                iterators[x.key] = resource
            return resource

        function, args, kwargs = map_nest(resolve, (fn, tuple(args), dict(kwargs)))
        try:
            value, staleness = self._call(number, status, function, args, kwargs)
        except ActorDied:
            # A server was lost, so the closure runs again, here or elsewhere: it must see the same
            # elements. An error of the function is final, and consumes its elements.
            for iterator in iterators.values():
                iterator.give_back()
            raise
        finally:
            for iterator in iterators.values():
                iterator.commit()  # of nothing, after `give_back`
        positions = {key: iterator.position for key, iterator in iterators.items()}
        return Completion(value, staleness, positions)

    def _call(
        self,
        number: int,
        status: RunStatus,
        fn: Callable[..., PyTree],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[PyTree, int | None]:
        if self._session is None:
            with self._enter(ClosurePlace(self._index, number, self._session)):
                return jax.block_until_ready(read_now(fn(*args, **kwargs))), None
        state = self._session.begin(number, status.low, status.servers, fn, status.read_ahead_limit)
        with self._enter(ClosurePlace(self._index, number, self._session, state)):
            value = jax.block_until_ready(read_now(fn(*args, **kwargs)))
        # The updates are sent after the function has returned, so a function that raises changes
        # nothing. If `finish` raises `ActorDied`, some servers may have applied their part: the
        # retry carries the same number, and they skip it.
        return value, state.finish()

    @contextlib.contextmanager
    def _enter(self, place: ClosurePlace) -> Iterator[None]:
        with enter_closure(place), jax.default_device(self._device):
            yield


class _Failure:
    """The error of a function that should have created a resource."""

    def __init__(self, error: Exception):
        self._error, self._traceback = error, error.__traceback__
        self._notes = list(getattr(error, "__notes__", ()))  # Python creates it with the first note

    def as_new(self) -> Exception:
        """Returns the error as it was raised first."""
        # Each `raise` adds to the traceback, and the callers of the worker add notes. This error
        # may be raised many times.
        self._error.__notes__ = list(self._notes)
        return self._error.with_traceback(self._traceback)


def experimental_get_current_worker_index() -> int:
    """Returns the number of the worker that runs this function.

    Raises:
        RuntimeError: If it is called outside of scheduled functions and of functions that create
            the dataset of a worker.

    Mirrors `tf.distribute.coordinator.experimental_get_current_worker_index`.
    """
    place = current_place()
    if place is None:
        raise RuntimeError(
            "experimental_get_current_worker_index() must be called on a worker: in a function "
            "that you pass to schedule, or in the function of create_per_worker_dataset."
        )
    return place.worker
