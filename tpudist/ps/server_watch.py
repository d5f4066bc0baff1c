"""ServerWatch: finds servers that hang, and kills them, so that they are replaced.

A server that is stopped (SIGSTOP), swaps, or has lost its machine answers nothing, and does not
die: its callers would wait forever. Pings are answered next to a server's current call, so a server
that compacts its log or grows a table does not look as if it hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tpudist.engine.engine import Actor, ActorDied, Engine, Future, ResultTimeout

CHECKS_PER_TIMEOUT = 8
"""Number of checks during the time after which a silent server is given up."""
_log = logging.getLogger("tpudist")


class ServerWatch:
    """A thread that pings servers.

    Args:
        engine: Runs the servers.
        actors: Called for the current servers; it must not wait for a lock that is held during a
            call of a server.
        timeout_s: Seconds without an answer after which a server is given up.
    """

    def __init__(self, engine: Engine, actors: Callable[[], Sequence[Actor]], timeout_s: float):
        self._engine, self._actors, self._timeout_s = engine, actors, timeout_s
        self._pings: dict[Actor, Future] = {}
        # A server that has never answered is not given up: importing JAX and replaying a log may
        # take longer than the timeout.
        self._started: set[Actor] = set()
        self._num_silent: dict[Actor, int] = {}
        self._is_over = False
        self._changed = engine.concurrency.condition()
        self._thread = engine.concurrency.start("tpudist watch of servers", self._run)

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join()

    def record_answer(self, actor: Actor) -> None:
        """Records that a server answered a call, so it has started even if no ping has seen it."""
        self._started.add(actor)  # other threads call this; adding to a set is atomic

    def _run(self) -> None:
        while True:
            actors = self._actors()
            # Forget actors that were replaced.
            self._pings = {x: call for x, call in self._pings.items() if x in actors}
            self._num_silent = {x: num for x, num in self._num_silent.items() if x in actors}
            self._started.intersection_update(actors)
            for actor in actors:
                self._check(actor)
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._is_over, self._timeout_s / CHECKS_PER_TIMEOUT
                ):
                    return

    def _check(self, actor: Actor) -> None:
        if actor not in self._pings:
            self._pings[actor] = self._engine.ping(actor)
        try:
            self._engine.result(self._pings[actor], 0.0)
        except ResultTimeout:
            self._count_silence(actor)
        except ActorDied:  # the next caller gets this error too, and replaces it
            self._started.discard(actor)
            self._num_silent.pop(actor, None)
        else:
            self._started.add(actor)
            self._num_silent[actor] = 0
            del self._pings[actor]

    def _count_silence(self, actor: Actor) -> None:
        if actor not in self._started:
            return
        # Checks are counted, and not seconds: if this program itself was stopped, all servers were
        # silent for long, but only one check noticed it.
        self._num_silent[actor] = self._num_silent.get(actor, 0) + 1
        # The first check comes right after the ping was sent, so it measures no time.
        if self._num_silent[actor] > CHECKS_PER_TIMEOUT:
            self._started.discard(actor)
            del self._num_silent[actor]
            why = f"it did not answer for {self._timeout_s:g} s, so it was given up."
            _log.warning("%s hangs: %s", actor, why)
            self._engine.kill(actor, why)
