"""Worker: what runs closures, as an actor of an engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax

from tpudist.context.closure_place import ClosurePlace, current_place, enter_closure
from tpudist.coordinator.remote_value import map_nest
from tpudist.coordinator.worker_iterator import WorkerIterator
from tpudist.engine.engine import Actor, ActorDied
from tpudist.ps.server_variable import read_now


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a closure is told of the run when it begins.

    Attributes:
        low: All closures of lower numbers have finished.
        servers: Who holds the variables now.
        num_scheduled: How many closures were scheduled before this one began, if some of them wait.
            What one of them reads may be read when this one ends: none can tell. 0 if not.
    """

    low: int = 0
    servers: tuple[Actor, ...] = ()
    num_scheduled: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """What has become of a closure.

    Attributes:
        value: What its function gave.
        staleness: How many closures had changed what it has read when it changed it; None if it
            changed nothing that it had read.
        positions: Where the iterators are that it has taken from, by key.
    """

    value: Any
    staleness: int | None
    positions: Mapping[int, Any]


@dataclasses.dataclass(frozen=True)
class Kept:
    """Stands for what a worker has made and keeps: in arguments, each worker's own."""

    key: int


class Worker:
    """Runs functions, on one device, and keeps what they need from one to the next."""

    def __init__(
        self,
        index: int,
        device: jax.Device | None = None,
        make_session: Callable[[int], Any] | None = None,
    ):
        """Worker `index`.

        Args:
            index: Its number.
            device: Where its arrays are made.
            make_session: Gives what it keeps for the strategy that schedules; see
                `ps.worker_session`.
        """
        self._index, self._device = index, device
        self._session = None if make_session is None else make_session(index)
        self._kept: dict[int, Any] = {}

    def keep(
        self, key: int, fn: Callable[..., Any], args: Sequence[Any], position: Any = None
    ) -> None:
        """Makes something that stays here; what it raises is raised where it is used.

        Args:
            key: By which it is found.
            fn: What makes it.
            args: For `fn`.
            position: Of an iterator: where one in its place has been.
        """
        try:
            with self._around(ClosurePlace(self._index, None, self._session)):
                found = self._kept[key] = fn(*args)
                if position is not None and isinstance(found, WorkerIterator):
                    found.go_to(position)
        except ActorDied:  # what it is made of was lost, and comes back
            self.forget(key)
            raise
        except Exception as error:
            self._kept[key] = _Failure(error, error.__traceback__)

    def forget(self, key: int) -> None:
        """Keeps something no longer."""
        self._kept.pop(key, None)

    def positions(self) -> dict[int, Any]:
        """Where its iterators are, by key."""
        kept = self._kept.items()
        return {key: found.position for key, found in kept if isinstance(found, WorkerIterator)}

    def run(
        self,
        number: int | None,
        surroundings: Surroundings,
        fn: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Completion:
        """Calls a function; what it gives, once it is computed and its changes are applied."""
        used: dict[int, WorkerIterator] = {}

        def resolve(x: Any) -> Any:
            if not isinstance(x, Kept):
                return x
            found = self._kept[x.key]
            if isinstance(found, _Failure):
                raise found.error.with_traceback(found.traceback)  # any number of times
            if isinstance(found, WorkerIterator):
                used[x.key] = found
            return found

        fn, args, kwargs = map_nest(resolve, (fn, tuple(args), dict(kwargs)))
        failed = True
        try:
            value, staleness = self._call(number, surroundings, fn, args, kwargs)
            failed = False
        except ActorDied:  # it is not the function that has failed: it will be called again
            raise
        except BaseException:
            failed = False
            raise
        finally:
            for iterator in used.values():
                if failed:
                    iterator.give_back()
                else:
                    iterator.commit()
        positions = {key: iterator.position for key, iterator in used.items()}
        return Completion(value, staleness, positions)

    def _call(
        self, number: int | None, surroundings: Surroundings, fn: Any, args: Any, kwargs: Any
    ) -> tuple[Any, int | None]:
        if self._session is None or number is None:
            with self._around(ClosurePlace(self._index, number, self._session)):
                return jax.block_until_ready(read_now(fn(*args, **kwargs))), None
        low, servers, ahead = surroundings.low, surroundings.servers, surroundings.num_scheduled
        state = self._session.begin(number, low, servers, fn, ahead)
        with self._around(ClosurePlace(self._index, number, self._session, state)):
            value = jax.block_until_ready(read_now(fn(*args, **kwargs)))
        return value, state.finish()

    @contextlib.contextmanager
    def _around(self, place: ClosurePlace) -> Iterator[None]:
        with enter_closure(place), jax.default_device(self._device):
            yield


@dataclasses.dataclass(frozen=True)
class _Failure:
    error: Exception
    traceback: TracebackType | None


def experimental_get_current_worker_index() -> int:
    """The number of the worker that runs this function.

    Raises:
        RuntimeError: It is not one that was scheduled, or that makes a dataset of a worker.

    As `tf.distribute.coordinator.experimental_get_current_worker_index`.
    """
    place = current_place()
    if place is None:
        raise RuntimeError(
            "experimental_get_current_worker_index() must be called on a worker: in a function "
            "that you pass to schedule, or in the function of create_per_worker_dataset."
        )
    return place.worker
