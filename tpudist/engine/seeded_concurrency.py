"""SeededConcurrency: runs one thread at a time, chosen by a seed, to replay any race.

A thread runs until it enters a condition, waits or ends. Then a random generator chooses among all
threads that can continue. So one seed gives one order of events, whatever the machine does. Time
stands still while any thread can continue; when all wait, it jumps to the end of the next timeout.
"""

# Invariant: exactly one participant runs; all others block in `turn.acquire()`. `_choose` hands
# over: it releases the turn of the chosen thread, and then waits for its own. `_mutex` guards
# `_by_ident` and `_participants` against threads that were just started: they register themselves
# before they are chosen.

import random
import threading
from collections.abc import Callable
from typing import NoReturn

from tpudist.engine.concurrency import Condition, MonitorCondition, MonitorLock, Thread

MIN_WAIT_S = 1e-6
"""Minimum seconds that pass in a wait, so that rounding cannot stop time before its end."""


class AllWait(RuntimeError):
    """Deadlock: all threads wait without a timeout. The message names what each waits for.

    The other threads keep waiting, so the `SeededConcurrency` cannot be used any more.
    """


class SeededConcurrency:
    """Threads, conditions and time in an order that a seed determines.

    The creating thread takes part as `main`. Threads that were started otherwise may not use its
    conditions.

    Args:
        seed: Seed of the order.

    Attributes:
        history: Names of the chosen threads, in order.
    """

    def __init__(self, seed: int):
        self.history: list[str] = []
        self._random = random.Random(seed)
        self._now_s = 0.0
        self._mutex = threading.Lock()
        main = _Participant("main")
        self._participants = [main]
        self._by_ident = {threading.get_ident(): main}

    def start(self, name: str, run: Callable[[], None]) -> Thread:
        """Starts a thread, which runs when it is chosen."""
        self._me()
        new = _Participant(name)

        def run_when_chosen() -> None:
            with self._mutex:
                self._by_ident[threading.get_ident()] = new
            new.turn.acquire()
            try:
                run()
            finally:
                self._end(new)

        thread = threading.Thread(target=run_when_chosen, name=name, daemon=True)
        with self._mutex:
            self._participants.append(new)
        thread.start()
        return _SeededThread(self, new)

    def condition(self) -> Condition:
        """Returns a new condition."""
        return MonitorCondition(_SeededLock(self))

    def now_s(self) -> float:
        """Returns the seconds that have passed while all threads waited."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Waits while other threads run, or time passes."""
        me = self._me()
        self._wait(me, lambda: False, seconds, f"sleeps for {seconds:g} s")

    # Within.

    def _me(self) -> "_Participant":
        me = self._by_ident.get(threading.get_ident())
        if me is None:
            raise RuntimeError(
                f"The thread {threading.current_thread().name!r} uses objects that are replayed "
                f"from a seed, but the engine did not start it, so its order is unknown. Use them "
                f"in the thread that created the engine."
            )
        return me

    def _wait(
        self, me: "_Participant", can_go_on: Callable[[], bool], limit_s: float | None, why: str
    ) -> bool:
        """Runs other threads until this one is chosen, once `can_go_on()` holds.

        Returns:
            Whether it holds; False after the timeout.
        """
        me.can_go_on, me.why = can_go_on, why
        me.until_s = self._until_s(limit_s)
        me.is_late = False
        self._choose(me)
        return not me.is_late

    def _until_s(self, limit_s: float | None) -> float | None:
        if limit_s is None:
            return None
        return self._now_s + (max(limit_s, MIN_WAIT_S) if limit_s > 0 else 0.0)

    def _choose(self, me: "_Participant") -> None:
        with self._mutex:
            chosen = self._next()
            if isinstance(chosen, str):
                # Raised in the main thread, where a test or a program expects errors.
                self._participants[0].deadlock = chosen
                chosen = self._participants[0]
            else:
                self.history.append(chosen.name)
        if chosen is not me:
            chosen.turn.release()
            if me.has_ended:
                return
            me.turn.acquire()
        if me.deadlock:
            self._raise_deadlock(me)

    def _next(self) -> "_Participant | str":
        able = [x for x in self._participants if x.can_go_on()]
        if not able:
            waiting = [(x, x.until_s) for x in self._participants if x.until_s is not None]
            if not waiting:
                return "; ".join(f"{x.name} {x.why}" for x in self._participants)
            # The next event can only be a timeout, so the clock jumps to the earliest one.
            self._now_s = max(self._now_s, min(until_s for _, until_s in waiting))
            able = [x for x, until_s in waiting if until_s <= self._now_s]
            for x in able:
                # All of them have timed out, so those that are not chosen now may be chosen later.
                x.is_late, x.can_go_on = True, _always
        chosen = self._random.choice(able)
        chosen.can_go_on, chosen.until_s, chosen.why = _always, None, "runs"
        return chosen

    def _raise_deadlock(self, me: "_Participant") -> NoReturn:
        why, me.deadlock = me.deadlock, ""
        raise AllWait(f"All threads wait without a timeout: {why}.")

    def _end(self, me: "_Participant") -> None:
        me.has_ended = True
        with self._mutex:
            self._participants.remove(me)
            del self._by_ident[threading.get_ident()]
        self._choose(me)


class _Participant:
    def __init__(self, name: str):
        self.name = name
        self.turn = threading.Semaphore(0)
        self.can_go_on: Callable[[], bool] = _always
        self.until_s: float | None = None
        self.is_late = self.has_ended = False
        self.why, self.deadlock = "was not started yet", ""


def _always() -> bool:
    return True


class _SeededThread:
    def __init__(self, concurrency: SeededConcurrency, participant: _Participant):
        self._concurrency, self._participant = concurrency, participant

    @property
    def name(self) -> str:
        return self._participant.name

    def join(self, timeout_s: float | None = None) -> bool:
        me = self._concurrency._me()
        return self._concurrency._wait(
            me,
            lambda: self._participant.has_ended,
            timeout_s,
            f"waits for the end of {self.name}",
        )


class _SeededTurn:
    is_woken = False

    def release(self) -> None:
        self.is_woken = True


class _SeededLock(MonitorLock):
    def __init__(self, concurrency: SeededConcurrency):
        super().__init__()
        self._concurrency = concurrency
        self._owner: _Participant | None = None

    def enter(self) -> None:
        if self._owner is not self._concurrency._me():
            self._wait(self._is_free, None, "waits to enter a condition")
            self.return_to(0)
        self.depth += 1

    def leave(self) -> None:
        if self._owner is not self._concurrency._me():  # a deadlock ended its wait without the lock
            return
        if self.depth == 1:
            self.leave_completely()
        else:
            self.depth -= 1

    def leave_completely(self) -> int:
        depth, self.depth = self.depth, 0
        self.wake_notified()
        self._owner = None
        return depth

    def return_to(self, entered: int) -> None:
        while not self._is_free():  # another thread may own it, such as after a timeout
            self._wait(self._is_free, None, "waits to enter a condition")
        self._owner, self.depth = self._concurrency._me(), entered

    def make_turn(self) -> _SeededTurn:
        return _SeededTurn()

    def wait(self, turn: _SeededTurn, timeout_s: float | None) -> None:
        # Until the lock is free, too: the thread is chosen only once, for both.
        self._wait(lambda: turn.is_woken and self._is_free(), timeout_s, "waits for a change")

    def now_s(self) -> float:
        return self._concurrency.now_s()

    def _wait(self, can_go_on: Callable[[], bool], limit_s: float | None, why: str) -> None:
        self._concurrency._wait(self._concurrency._me(), can_go_on, limit_s, why)

    def _is_free(self) -> bool:
        return self._owner is None
