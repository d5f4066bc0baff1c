"""Runs an iterator ahead of its consumer in a background thread, within a bound.

The thread ends with the iterator, with `close`, and when nobody holds the `Prefetcher` any more: a
`break` out of a loop is enough. It is a daemon and holds no lock of the interpreter's exit.
"""

import atexit
import collections
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

# Registered after JAX's own: at exit, no thread may still copy to devices that JAX is taking down.
import jax

from tpudist.input.transfer.turns import Turns
from tpudist.xla.settings import Setting

T = TypeVar("T")
_EXIT_TIMEOUT_S = 2.0
# How long a loop that makes its items may be away before the thread goes on.
_AWAY_S = 4e-3
_live: "weakref.WeakSet[Prefetcher]" = weakref.WeakSet()
# Of prefetchers that are gone too: a thread that is in JAX when the interpreter ends aborts it.
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


class Prefetcher(Iterator[T], Generic[T]):
    """The items of an iterator, in its order, made up to `buffer_size` items ahead.

    What the iterator raises is raised by the `next` that asks for the item in question, with the
    traceback of the iterator; after that, as after its end, there are no more items.
    """

    def __init__(self, iterator: Iterator[T], buffer_size: int, *, any_thread: bool = False):
        """Starts to run `iterator`, in a copy of the caller's context variables.

        Args:
            iterator: What to run.
            buffer_size: How many items to make ahead.
            any_thread: Whether `iterator` may also run in the thread that asks for an item. It does
                where a loop always waits for the next one, and nothing could be made meanwhile.
        """
        assert buffer_size > 0, buffer_size
        make = _bind_context(iterator)
        self._buffer = _Buffer(buffer_size)
        self._make_here = make if any_thread else None
        self._turns = Turns()
        # The thread must not hold this object, or it would never be collected.
        self._thread = threading.Thread(
            target=_fill, args=(self._buffer, make), name="tpudist-prefetch", daemon=True
        )
        weakref.finalize(self, self._buffer.close).atexit = False
        _live.add(self)
        _threads.add(self._thread)
        self._thread.start()

    def __next__(self) -> T:
        """The next item, waiting for it if it is not ready."""
        make = self._make_here
        if make is not None and self._turns.is_loops_turn():
            item, error = self._buffer.get_or_make(make)
        else:
            item, error = self._buffer.get()
        if error is None:
            self._turns.resume_loop()
            return item
        self._end()
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the thread, once the iterator has made the item it is at; no items come after.

        Args:
            timeout_s: How long to wait for it; None for as long as it takes.
        """
        self._end()
        self._thread.join(timeout_s)

    def _end(self) -> None:
        self._buffer.close()
        self._make_here = None


class _Buffer:
    """A queue of (item, error) pairs; once closed it takes no new ones and gives its end."""

    # `_is_made` is the right to make the next item: taken and given back under the lock, so that
    # one is made at a time, in order, by the thread or by a loop. A loop that makes its own counts
    # them; the thread keeps out as long as the count grows within `_AWAY_S`.

    def __init__(self, size: int):
        self._size = size
        self._items: collections.deque[tuple[Any, BaseException | None]] = collections.deque()
        self._closed = False
        self._is_made = False  # whether somebody is at the next item
        self._num_made_by_loop = 0  # since the thread was last told to go on
        self._num_waiting = 0  # loops: one, as a rule
        self._lock = threading.RLock()  # `close` may be called when Python collects garbage
        self._changed = threading.Condition(self._lock)

    def wait_for_room(self) -> bool:
        """Waits until one more item fits and it is the thread's to make; whether it is wanted."""
        with self._lock:
            while not self._closed:
                if len(self._items) >= self._size:
                    self._changed.wait()
                elif self._is_made or self._num_made_by_loop:
                    before = self._num_made_by_loop
                    # Timed, because to be told of each item would cost as much as to make it.
                    self._changed.wait(_AWAY_S)
                    if self._num_made_by_loop == before and not self._is_made:
                        self._num_made_by_loop = 0
                else:
                    self._is_made = True
                    return True
            return False

    def put(self, item: Any, error: BaseException | None = None) -> None:
        with self._lock:
            self._is_made = False
            if not self._closed:
                self._items.append((item, error))
            self._changed.notify_all()

    def get(self) -> tuple[Any, BaseException | None]:
        with self._lock:
            if self._num_made_by_loop:
                self._num_made_by_loop = 0
                self._changed.notify_all()
            while not self._closed and not self._items:
                self._wait()
            return self._pop()

    def get_or_make(self, make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """As `get`, but if no item is there and nobody is at it, it is made here."""
        is_mine = False
        try:
            with self._lock:
                self._num_made_by_loop += 1
                while not self._closed and not self._items and self._is_made:
                    self._wait()
                if self._closed or self._items:
                    return self._pop()
                # None is there and nobody is at one: what is made here is the next in order.
                is_mine = self._is_made = True
            try:
                return make(), None
            except BaseException as error:
                return None, error
        finally:
            if is_mine:
                with self._lock:
                    self._is_made = False
                    if self._num_waiting:
                        self._changed.notify_all()

    def _wait(self) -> None:
        self._num_waiting += 1
        try:
            self._changed.wait()
        finally:
            self._num_waiting -= 1

    def _pop(self) -> tuple[Any, BaseException | None]:
        if self._closed:
            return None, StopIteration()
        pair = self._items.popleft()
        self._changed.notify_all()
        return pair

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _bind_context(iterator: Iterator[T]) -> Callable[[], T]:
    """What makes the next item, in a copy of the context variables of now.

    `with jax.enable_x64(True)` holds for one thread: the thread that makes items enters it too.
    """
    run, has_64_bits = contextvars.copy_context().run, Setting.ENABLE_X64.read()

    def make() -> T:
        if Setting.ENABLE_X64.read() == has_64_bits:
            return run(next, iterator)
        with jax.enable_x64(has_64_bits):
            return run(next, iterator)

    return make


def _fill(buffer: _Buffer, make: Callable[[], Any]) -> None:
    try:
        # Room first: an item made before there is room would be one more in memory.
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
