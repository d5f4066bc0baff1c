"""RemoteValue: the future result of a scheduled function; PerWorkerValue: one value per worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree, is_named_tuple
from tpudist.engine.concurrency import Condition, SystemConcurrency


class RemoteValue:
    """The result of a scheduled function, which may not have run yet.

    `ClusterCoordinator.schedule` creates it, without a value.

    Args:
        changed: Condition that guards the value; by default a new one.
        withdraw: Called to cancel the function if it has not started; returns whether it did.

    Mirrors `tf.distribute.coordinator.RemoteValue`.
    """

    def __init__(
        self,
        *,
        changed: Condition | None = None,
        withdraw: Callable[[RemoteValue], bool] = lambda output: False,
    ):
        # Shared with the queue, so that a result and the queue change at the same moment.
        self._changed = SystemConcurrency().condition() if changed is None else changed
        self._arrived: Condition | None = None  # for threads that wait for the value
        self._withdraw = withdraw
        self._is_done = self._is_withdrawn = False
        self._value: PyTree = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def done(self) -> bool:
        """Returns whether a result or an error exists, so that `fetch` and `get` do not wait.

        Mirrors `concurrent.futures.Future.done`; TensorFlow's RemoteValue has no such method.
        """
        with self._changed:
            return self._is_done

    def cancel(self) -> bool:
        """Cancels the function if no worker has started it.

        Then `fetch` and `get` raise CancelledError, but `schedule`, `join` and `done` of the
        coordinator do not. The function keeps its number, so a restarted program does not run it
        either.

        Returns:
            Whether the function is canceled, by this or an earlier call. A function that a worker
            has started cannot be canceled, even if that worker was lost and the function waits for
            another one: a server may have applied its changes.

        Mirrors `concurrent.futures.Future.cancel`; TensorFlow's RemoteValue has no such method.
        """
        with self._changed:
            return self._is_withdrawn or self._withdraw(self)

    def fetch(self) -> PyTree:
        """Waits for the result, and returns it with NumPy arrays.

        Raises:
            CancelledError: If the function was canceled, or another function failed before it ran.
            Exception: If the function raised an error, with the worker's traceback.
        """
        return jax.tree.map(_as_numpy, self.get())

    def get(self) -> PyTree:
        """Waits for the result, and returns it.

        Raises:
            CancelledError: If the function was canceled, or another function failed before it ran.
            Exception: If the function raised an error, with the worker's traceback.
        """
        with self._changed:
            if not self._is_done:
                self._arrived = self._arrived or self._changed.branch()
                self._arrived.wait_for(lambda: self._is_done)
        if self._error is not None:
            # Each `raise` adds to the traceback, and this error may be raised any number of times.
            raise self._error.with_traceback(self._traceback)
        return self._value

    # `ClosureQueue` calls both under `changed`.

    def _set(self, value: PyTree) -> None:
        self._value, self._error = value, None
        self._finish()

    def _fail(self, error: BaseException) -> None:
        self._error, self._traceback = error, error.__traceback__
        self._finish()

    def _finish(self) -> None:
        self._is_done = True
        if self._arrived is not None:
            self._arrived.notify_all()

    def __repr__(self) -> str:
        if not self._is_done:
            return "<RemoteValue, not computed yet>"
        result = self._value if self._error is None else self._error
        return f"<RemoteValue {result!r}>"


class PerWorkerValue:
    """One value for each worker: an argument of `schedule`. Each worker sees its own value.

    Args:
        values: One RemoteValue per worker, in the order of the workers.

    Raises:
        AssertionError: If a value is not a RemoteValue.

    Mirrors `tf.distribute.coordinator.PerWorkerValue`.
    """

    def __init__(self, values: Sequence[RemoteValue]):
        for value in values:
            if not isinstance(value, RemoteValue):
                raise AssertionError(  # as TensorFlow does
                    f"PerWorkerValue({value!r}) of type {type(value).__name__}: it needs one "
                    f"RemoteValue per worker, as create_per_worker_dataset returns."
                )
        self._values = tuple(values)

    def of_worker(self, worker: int) -> PyTree:
        """Waits for the value of a worker, without a limit, and returns it.

        Raises:
            ValueError: If the worker was added after the value was created.
            Exception: If the function that computes the value raised an error.
        """
        if worker >= len(self._values):
            raise ValueError(
                f"A PerWorkerValue with values for {len(self._values)} worker(s) was passed to a "
                f"function on worker {worker}. Create it with a value for each worker, or do not "
                f"add workers."
            )
        return self._values[worker].fetch()


def map_nest(fn: Callable[[Any], Any], nest: PyTree) -> PyTree:
    """Applies `fn` to the leaves of nested lists, tuples and dicts; other pytrees are leaves."""
    if isinstance(nest, dict):
        return {key: map_nest(fn, x) for key, x in nest.items()}
    if is_named_tuple(nest):
        return type(nest)(*(map_nest(fn, x) for x in nest))
    if isinstance(nest, tuple | list):
        return type(nest)(map_nest(fn, x) for x in nest)
    return fn(nest)


def fetch_all(nest: PyTree) -> PyTree:
    """Replaces the RemoteValues in a nested structure by their results; waits for all of them."""
    return jax.tree.map(
        lambda x: x.fetch() if isinstance(x, RemoteValue) else x,
        nest,
        is_leaf=lambda x: isinstance(x, RemoteValue),
    )


def _as_numpy(x: object) -> object:
    # `[()]` turns an array without dims into a NumPy number, as TensorFlow's `fetch` does.
    return np.asarray(x)[()] if isinstance(x, jax.Array) else x
