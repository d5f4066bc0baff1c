"""IdleWorkers: the workers that wait for a closure. A new closure wakes one of them."""

# Invariant: while a closure may start, a woken worker is on its way to take it, or no worker waits.
# Each event that lets one closure start calls `wake_one`; an event that may let several start wakes
# one worker too, and that one wakes the next when it has taken its closure. A worker waits only
# after it has found no closure that may start. Otherwise a closure would wait while workers sleep.
#
# With stragglers, a worker must also wake when a closure becomes slow. One idle worker, the
# watcher, sleeps until then; the others need no timer. A worker that stops waiting for good may
# have been the watcher, so it wakes another worker, which takes its place.

from __future__ import annotations

from collections.abc import Callable

from tpudist.coordinator.closure import Closure
from tpudist.engine.concurrency import Concurrency, Condition


class IdleWorkers:
    """Workers without a closure. All methods are called under the condition of the queue.

    Args:
        changed: Condition of the queue.
        concurrency: Provides the clock.
        next_slow: Returns the closure that becomes slow next, after the time when it does, or None;
            None instead of the function if workers do not start slow closures again.
    """

    def __init__(
        self,
        changed: Condition,
        concurrency: Concurrency,
        next_slow: Callable[[], tuple[float, Closure] | None] | None,
    ):
        self._concurrency, self._next_slow = concurrency, next_slow
        self._waiting, self._watching = changed.branch(), changed.branch()
        self._is_watched = False

    def wake_one(self) -> None:
        """Wakes one worker, if it has something to do."""
        self._waiting.notify_one()
        if self._is_watched:
            self._watching.notify_one()

    def wake_all(self) -> None:
        """Wakes all workers that have something to do, such as to end."""
        self._waiting.notify_all()
        self._watching.notify_all()

    def set_timer(self) -> None:
        """Wakes the watcher, if a closure becomes slow earlier than it expects."""
        self._watching.notify_one()

    def wait(self, has_work: Callable[[], bool], end_s: float | None) -> None:
        """Waits at most until `end_s`, or until a worker may have something to do.

        Args:
            has_work: Called to ask whether this worker should stop waiting.
            end_s: Time of the engine's clock; None for no limit.
        """
        next_slow = self._next_slow
        if next_slow is None or self._is_watched:
            must_watch = next_slow is not None
            self._waiting.wait_for(
                lambda: has_work() or (must_watch and not self._is_watched), self._left_s(end_s)
            )
            return
        expected = next_slow()

        def is_earlier() -> bool:
            slow = next_slow()
            return slow is not None and (expected is None or slow[0] < expected[0])

        known_s = [x for x in (expected and expected[0], end_s) if x is not None]
        self._is_watched = True
        try:
            self._watching.wait_for(
                lambda: has_work() or is_earlier(), self._left_s(min(known_s, default=None))
            )
        finally:
            self._is_watched = False

    def _left_s(self, end_s: float | None) -> float | None:
        return None if end_s is None else max(end_s - self._concurrency.now_s(), 0.0)
