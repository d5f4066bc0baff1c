"""WorkerResources: functions, datasets and iterators that each worker creates and keeps.

Knows which resources exist and which ones each worker has, and sends the difference. A worker that
replaces a lost one creates all of them again, its iterators at the last known positions.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpudist.coordinator.function_store import StoredFunction
from tpudist.engine.concurrency import Condition
from tpudist.engine.engine import Actor, Engine

START_S = 300.0
"""A new worker gets at least this many seconds to start and to create a resource, even if
`closure_timeout_s` is shorter: importing JAX and joining a Ray cluster may take longer."""


@dataclasses.dataclass
class _Created:
    """Resources of an actor.

    Attributes:
        keys: Their keys.
        num_changes: Number of changes of the resources that the actor has seen; -1 if unknown.
    """

    keys: set[int] = dataclasses.field(default_factory=set)
    num_changes: int = -1


class WorkerResources:
    """Resources of all workers.

    Args:
        engine: Runs the workers.
        changed: Condition that guards the resources.
        timeout_s: Maximum seconds for a closure; None for no limit.

    Attributes:
        unused: Keys to delete. Anybody may append without a lock: the garbage collector does when
            it finds an unused iterator, and it may run in the middle of `sync`.
    """

    def __init__(self, engine: Engine, changed: Condition, timeout_s: float | None):
        self._engine, self._changed = engine, changed
        self._timeout_s = timeout_s
        self._start_timeout_s = None if timeout_s is None else max(timeout_s, START_S)
        self._keys = itertools.count()
        self._factories: dict[int, tuple[Callable[..., Any], Sequence[Any]]] = {}
        self._num_changes = 0  # of `_factories`
        self._created: dict[Actor, _Created] = {}
        self._positions: dict[int, dict[int, int]] = {}  # by worker and key
        self.unused: collections.deque[int] = collections.deque()

    def add(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> int:
        """Adds a resource, which each worker creates with `fn(*args)`; returns its key."""
        with self._changed:
            key = next(self._keys)
            self._factories[key] = fn, args
            self._num_changes += 1
            return key

    def remove(self, key: int) -> None:
        """Removes a resource; a worker deletes it before its next closure."""
        with self._changed:
            self._remove(key)

    def _remove(self, key: int) -> None:
        self._num_changes += self._factories.pop(key, None) is not None

    def sync(self, worker: int, actor: Actor, stored: StoredFunction | None = None) -> None:
        """Creates missing resources on a worker, and deletes removed ones.

        Only the thread of the worker calls this, between two closures, so `_created[actor]` and
        `_positions[worker]` need no lock. Calls of one actor run in order: the next closure finds
        the resources.

        Args:
            worker: Number of the worker.
            actor: Actor of the worker.
            stored: Function of the next closure.

        Raises:
            ActorDied: If the worker, or a server that a resource needs, was lost.
            ResultTimeout: If the worker does not start or create a resource in time.
        """
        with self._changed:
            while self.unused:
                self._remove(self.unused.popleft())
            num_changes, is_new = self._num_changes, actor not in self._created
            created = self._created.setdefault(actor, _Created())
            if created.num_changes == num_changes and (
                stored is None or stored.ref.key in created.keys
            ):
                return  # as for most closures
            factories = dict(self._factories)
        if stored is not None:
            # `FunctionStore` may have removed the function after the closure was scheduled.
            factories[stored.ref.key] = stored.load, (stored.data,)
        if is_new and self._start_timeout_s is not None:
            # Any call does: its answer shows that the worker has started.
            call = self._engine.call(actor, "positions")
            self._engine.result(call, self._start_timeout_s)
        positions = self._positions.setdefault(worker, {})
        for key in positions.keys() - factories.keys():
            del positions[key]
        for key in sorted(created.keys - factories.keys()):
            self._engine.call(actor, "delete_resource", key)
            created.keys.discard(key)
        # In the order of their keys, so that a run with a seeded engine can be replayed.
        for key in sorted(factories.keys() - created.keys):
            call = self._engine.call(
                actor, "create_resource", key, *factories[key], positions.get(key)
            )
            self._engine.result(call, self._start_timeout_s)
            created.keys.add(key)
        # A function that `FunctionStore` has removed is deleted before another closure.
        is_removed = stored is not None and stored.ref.key not in self._factories
        created.num_changes = -1 if is_removed else num_changes

    def record_positions(self, worker: int, positions: Mapping[int, int]) -> None:
        """Records how far the iterators of a worker are."""
        self._positions.setdefault(worker, {}).update(positions)

    def fetch_positions(self, worker: int, actor: Actor) -> None:
        """Asks a worker for the positions, because an error of a closure arrived without them."""
        # If the worker is lost now, the next call notices; its successor repeats some elements.
        with contextlib.suppress(Exception):
            call = self._engine.call(actor, "positions")
            self.record_positions(worker, self._engine.result(call, self._timeout_s))

    def forget_actor(self, actor: Actor) -> None:
        """Forgets which resources an actor has, because it has ended."""
        self._created.pop(actor, None)

    def forget_worker(self, worker: int) -> None:
        """Forgets the positions of a worker that was removed."""
        self._positions.pop(worker, None)
