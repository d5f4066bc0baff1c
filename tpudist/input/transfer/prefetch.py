"""Runs an iterator ahead of its consumer in a background thread, within a bound.

The thread ends with the iterator, with `close`, or when the last reference to the `Prefetcher` is
gone: a `break` out of a loop is enough. It is a daemon, so it never keeps the interpreter from
exiting.
"""

import atexit
import collections
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

# Before the registration at the end of this file, because functions at exit run in reverse order:
# no thread may still copy to devices while JAX shuts them down.
import jax

from tpudist.input.transfer.turns import Turns
from tpudist.xla.settings import Setting

_T = TypeVar("_T")
# Seconds to wait for one thread at exit. A thread may be stuck in a user's iterator.
_EXIT_TIMEOUT_S = 2.0
# Seconds without `next` after which the thread makes items again, for a loop that makes its own. It
# is a few times `turns._SOON_S`, so a loop that stays away longer is at work.
_AWAY_S = 4e-3
_live: "weakref.WeakSet[Prefetcher]" = weakref.WeakSet()
# Also threads whose prefetchers are gone: a thread inside JAX at the end of the interpreter aborts
# the process.
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


class Prefetcher(Iterator[_T], Generic[_T]):
    """The items of an iterator, in its order, made up to `buffer_size` items ahead.

    If the iterator raises an error, the `next` for that item raises it, with the traceback of the
    iterator. There are no more items then, as at its end. The iterator runs in a copy of the
    caller's context variables, and starts at once.

    Args:
        iterator: The iterator to run.
        buffer_size: Number of items to make ahead.
        may_run_in_loop: Whether `iterator` may also run in the thread that calls `next`. It does
            so for a loop that always waits for the next item, where another thread would only add
            delay.
        max_bytes: Bytes of items after which no other item is made ahead; None for no limit.
        count_bytes: Called with an item; returns its bytes.
    """

    def __init__(
        self,
        iterator: Iterator[_T],
        buffer_size: int,
        *,
        may_run_in_loop: bool = False,
        max_bytes: int | None = None,
        count_bytes: Callable[[_T], int] = lambda item: 0,
    ):
        assert buffer_size > 0, buffer_size
        make = _bind_context(iterator)
        self._buffer = _Buffer(buffer_size, max_bytes, count_bytes)
        self._make_in_loop = make if may_run_in_loop else None
        self._turns = Turns()
        # The thread must have no reference to this object, or it would never be collected.
        self._thread = threading.Thread(
            target=_fill, args=(self._buffer, make), name="tpudist-prefetch", daemon=True
        )
        weakref.finalize(self, self._buffer.close).atexit = False
        _live.add(self)
        _threads.add(self._thread)
        self._thread.start()

    def __next__(self) -> _T:
        make = self._make_in_loop
        if make is not None and self._turns.is_loops_turn():
            item, error = self._buffer.get_or_make(make)
        else:
            item, error = self._buffer.get()
        if error is None:
            self._turns.resume_loop()
            return item  # type: ignore[return-value]
        self._end()
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame, which would be a reference cycle

    @property
    def num_ready(self) -> int:
        """Number of items, or errors in their place, that `next` returns without waiting."""
        return self._buffer.num_items

    def close(self, timeout_s: float | None = None) -> None:
        """Drops all items, and waits for the thread, which ends after the item that it is making.

        Args:
            timeout_s: Seconds to wait for the thread; None for no limit.
        """
        self._end()
        self._thread.join(timeout_s)

    def _end(self) -> None:
        self._buffer.close()
        self._make_in_loop = None


class _Buffer(Generic[_T]):
    """A bounded queue of (item, error) pairs between the thread and the loop.

    One item is made at a time, by the thread or by the loop. `_is_making` is the right to make the
    next one. It is taken and released under the lock, so the items keep the iterator's order. While
    the loop makes its own items it counts its turns. The thread waits until the count has not grown
    for `_AWAY_S`. Once closed, the queue accepts no items, and `get` returns StopIteration.
    """

    def __init__(self, size: int, max_bytes: int | None, count_bytes: Callable[[_T], int]):
        self._size, self._max_bytes, self._count_bytes = size, max_bytes, count_bytes
        self._num_bytes = 0  # of the items
        self._items: collections.deque[tuple[_T | None, BaseException | None]] = collections.deque()
        self._is_closed = False
        self._is_making = False  # whether the thread or a loop makes the next item now
        self._num_loop_turns = 0  # since the thread made items; 0: it does so now
        self._num_waiting = 0  # loops that wait for an item: usually one
        # Reentrant: the garbage collector may call `close` in a thread that has the lock.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def num_items(self) -> int:
        """Number of pairs in the queue."""
        return len(self._items)

    def wait_for_room(self) -> bool:
        """Waits until the thread may make an item, and there is room; False if it must end."""
        with self._lock:
            while not self._is_closed:
                if self._is_full():
                    self._changed.wait()
                elif self._is_making or self._num_loop_turns:
                    before = self._num_loop_turns
                    # With a timeout: a notification for each item costs as much as the item.
                    self._changed.wait(_AWAY_S)
                    if self._num_loop_turns == before and not self._is_making:
                        self._num_loop_turns = 0
                else:
                    self._is_making = True
                    return True
            return False

    def _is_full(self) -> bool:
        if self._max_bytes is not None and self._num_bytes >= self._max_bytes and self._items:
            return True
        return len(self._items) >= self._size

    def put(self, item: _T | None, error: BaseException | None = None) -> None:
        """Appends an item, or the error in its place. Call it after `wait_for_room`."""
        with self._lock:
            self._is_making = False
            if not self._is_closed:
                self._items.append((item, error))
                self._num_bytes += 0 if item is None else self._count_bytes(item)
            self._changed.notify_all()

    def get(self) -> tuple[_T | None, BaseException | None]:
        """Waits for the next item or error, and removes it. From now on the thread makes items."""
        with self._lock:
            if self._num_loop_turns:
                self._num_loop_turns = 0
                self._changed.notify_all()
            while not self._is_closed and not self._items:
                self._wait()
            return self._pop()

    def get_or_make(self, make: Callable[[], _T]) -> tuple[_T | None, BaseException | None]:
        """Returns the same as `get`, but makes the item here if the thread is not making it."""
        is_mine = False
        try:
            with self._lock:
                self._num_loop_turns += 1
                while not self._is_closed and not self._items and self._is_making:
                    self._wait()
                if self._is_closed or self._items:
                    return self._pop()
                # The queue is empty and no item is being made, so this one is the next in order.
                is_mine = self._is_making = True
            try:
                return make(), None
            except BaseException as error:
                return None, error
        finally:
            if is_mine:
                with self._lock:
                    self._is_making = False
                    if self._num_waiting:
                        self._changed.notify_all()

    def _wait(self) -> None:
        self._num_waiting += 1
        try:
            self._changed.wait()
        finally:
            self._num_waiting -= 1

    def _pop(self) -> tuple[_T | None, BaseException | None]:
        if self._is_closed:
            return None, StopIteration()
        pair = self._items.popleft()
        self._num_bytes -= 0 if pair[0] is None else self._count_bytes(pair[0])
        self._changed.notify_all()
        return pair

    def close(self) -> None:
        """Drops all items, and wakes up all threads that wait here."""
        with self._lock:
            self._is_closed = True
            self._items.clear()
            self._changed.notify_all()


def _bind_context(iterator: Iterator[_T]) -> Callable[[], _T]:
    """Returns a function that makes the next item, in a copy of the present context variables.

    `with jax.enable_x64(True)` applies to one thread only, so the function enters it too.
    """
    run, has_64_bits = contextvars.copy_context().run, Setting.ENABLE_X64.read()

    def make() -> _T:
        if Setting.ENABLE_X64.read() == has_64_bits:
            return run(next, iterator)
        with jax.enable_x64(has_64_bits):
            return run(next, iterator)

    return make


def _fill(buffer: _Buffer[_T], make: Callable[[], _T]) -> None:
    try:
        # Waits before making an item: otherwise one more than `buffer_size` would be in memory.
        while buffer.wait_for_room():
            buffer.put(make())
    except BaseException as error:
        buffer.put(None, error)


@atexit.register
def _close_all() -> None:
    for prefetcher in list(_live):
        prefetcher.close(_EXIT_TIMEOUT_S)
    for thread in list(_threads):
        thread.join(_EXIT_TIMEOUT_S)
