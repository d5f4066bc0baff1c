"""RemoteValue: what a closure will give, once a worker has run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np

from tpudist.engine.concurrency import Condition, SystemConcurrency


class RemoteValue:
    """The result of a function that was scheduled, which may not have run yet.

    As `tf.distribute.coordinator.RemoteValue`.
    """

    def __init__(
        self,
        *,
        changed: Condition | None = None,
        withdraw: Callable[[RemoteValue], bool] = lambda output: False,
    ):
        """Created by `ClusterCoordinator.schedule`, without a value.

        Args:
            changed: Condition to notify when the value arrives; by default a new one.
            withdraw: Called to cancel the function if it has not started; returns whether it did.
        """
        self._changed = SystemConcurrency().condition() if changed is None else changed
        self._withdraw = withdraw
        self._is_there = self._is_withdrawn = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def done(self) -> bool:
        """Returns whether a result or an error exists, so that `fetch` and `get` do not wait.

        Mirrors `concurrent.futures.Future.done`; TensorFlow's RemoteValue has no such method.
        """
        with self._changed:
            return self._is_there

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

    def fetch(self) -> Any:
        """Waits for the result, and returns it with NumPy arrays.

        Raises:
            CancelledError: If the function was canceled, or another function failed before it ran.
            Exception: If the function raised an error, with the worker's traceback.
        """
        return jax.tree.map(_as_numpy, self.get())

    def get(self) -> Any:
        """Waits for the result, and returns it.

        Raises:
            CancelledError: If the function was canceled, or another function failed before it ran.
            Exception: If the function raised an error, with the worker's traceback.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_there)
        if self._error is not None:
            # Each `raise` adds to the traceback, and this error may be raised any number of times.
            raise self._error.with_traceback(self._traceback)
        return self._value

    def _set(self, value: Any) -> None:
        self._value, self._error, self._is_there = value, None, True

    def _fail(self, error: BaseException) -> None:
        self._error, self._traceback, self._is_there = error, error.__traceback__, True

    def __repr__(self) -> str:
        if not self._is_there:
            return "<RemoteValue, not computed yet>"
        what = self._value if self._error is None else self._error
        return f"<RemoteValue {what!r}>"


class PerWorkerValue:
    """One value for each worker: an argument of `schedule`. Each worker sees its own value.

    Mirrors `tf.distribute.coordinator.PerWorkerValue`.
    """

    def __init__(self, values: Sequence[RemoteValue]):
        """Of the workers, in their order.

        Raises:
            AssertionError: One of them is no RemoteValue.
        """
        for value in values:
            if not isinstance(value, RemoteValue):
                raise AssertionError(
                    f"PerWorkerValue({value!r}) of type {type(value).__name__}: it needs one "
                    f"RemoteValue per worker, as create_per_worker_dataset returns."
                )
        self._values = tuple(values)

    def of_worker(self, worker: int) -> Any:
        """The value of one worker; waits for it.

        Raises:
            ValueError: There is none, since the worker came later.
            Exception: What the function has raised that was to compute it.
        """
        if worker >= len(self._values):
            raise ValueError(
                f"A PerWorkerValue with values for {len(self._values)} worker(s) was passed to a "
                f"function on worker {worker}. Create it with a value for each worker, or do not "
                f"add workers."
            )
        return self._values[worker].fetch()


def map_nest(fn: Callable[[Any], Any], nest: Any) -> Any:
    """A nest of lists, tuples and dicts with `fn(x)` for what is in it; other objects are whole."""
    if isinstance(nest, dict):
        return {key: map_nest(fn, x) for key, x in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_nest(fn, x) for x in nest))
    if isinstance(nest, tuple | list):
        return type(nest)(map_nest(fn, x) for x in nest)
    return fn(nest)


def fetch_all(nest: Any) -> Any:
    """A nest with what its RemoteValues give; waits for all of them."""
    return jax.tree.map(
        lambda x: x.fetch() if isinstance(x, RemoteValue) else x,
        nest,
        is_leaf=lambda x: isinstance(x, RemoteValue),
    )


def _as_numpy(x: Any) -> Any:
    return np.asarray(x)[()] if isinstance(x, jax.Array) else x  # a number of one without dims
