"""ServerWatch: finds out which servers hang, and kills them, so that they are replaced.

A server that is stopped (SIGSTOP), swaps or has lost its machine answers nothing, and does not die:
who has called it would wait for ever. What is asked here is answered beside what a server does, so
that one that is at a long call, as it writes its log anew or a table grows, does not look like one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tpudist.engine.engine import Actor, ActorDied, Engine, Future, ResultTimeout

NUM_LOOKS = 8
"""In how many looks, one after the other, there is no answer of a server that is given up."""
_log = logging.getLogger("tpudist")


class ServerWatch:
    """A thread that asks servers whether they are there.

    One that has never answered anything is not given up: it may take long to start. Looks are
    counted, and not time, so that a program that was stopped itself does not find all servers
    silent.
    """

    def __init__(self, engine: Engine, actors: Callable[[], Sequence[Actor]], timeout_s: float):
        """Begins.

        Args:
            engine: Where they live.
            actors: Who they are; must not wait for a lock that is held while a server is asked.
            timeout_s: After how many seconds without an answer one is given up.
        """
        self._engine, self._actors, self._timeout_s = engine, actors, timeout_s
        self._asked: dict[Actor, Future] = {}
        self._started: set[Actor] = set()  # has answered a look, or what it was called for
        self._num_silent: dict[Actor, int] = {}
        self._is_over = False
        self._changed = engine.concurrency.condition()
        self._thread = engine.concurrency.start("tpudist watch of servers", self._run)

    def close(self) -> None:
        """Ends it."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join()

    def note_answer(self, actor: Actor) -> None:
        """A server has answered a call: it has started, though no look may have seen it yet."""
        self._started.add(actor)

    def _run(self) -> None:
        while True:
            actors = self._actors()
            self._asked = {x: call for x, call in self._asked.items() if x in actors}
            for actor in actors:
                self._look(actor)
            with self._changed:
                if self._changed.wait_for(lambda: self._is_over, self._timeout_s / NUM_LOOKS):
                    return

    def _look(self, actor: Actor) -> None:
        if actor not in self._asked:
            self._asked[actor] = self._engine.ping(actor)
        try:
            self._engine.result(self._asked[actor], 0.0)
        except ResultTimeout:
            self._note_silence(actor)
        except ActorDied:  # who needs it is told, and has it replaced
            self._started.discard(actor)
            self._num_silent.pop(actor, None)
        else:
            self._started.add(actor)
            self._num_silent[actor] = 0
            del self._asked[actor]

    def _note_silence(self, actor: Actor) -> None:
        if actor not in self._started:
            return
        self._num_silent[actor] = self._num_silent.get(actor, 0) + 1
        if self._num_silent[actor] > NUM_LOOKS:
            self._started.discard(actor)
            del self._num_silent[actor]
            why = f"it did not answer for {self._timeout_s:g} s, so it was given up."
            _log.warning("%s hangs: %s", actor, why)
            self._engine.kill(actor, why)
