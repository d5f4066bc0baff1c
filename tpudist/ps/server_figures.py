"""ServerFigures: what servers say of themselves, asked for without waiting for them.

A server answers one call after the other, so one that is busy answers late, and one that hangs
never: until it does, it keeps the figures that it gave last, and their age says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tpudist.engine.engine import Actor, Future, ResultTimeout
from tpudist.ps.servers import Servers


@dataclasses.dataclass(frozen=True)
class ServerFigures:
    """The figures of one server at one moment.

    Attributes:
        server: Number of the server.
        state: `answers`; `silent` if it did not answer in time; `dead`; or `starts` while another
            server continues from the log of a dead one.
        age_s: Age of the figures below, in seconds; None if the server has never answered.
        restarts: Number of earlier servers with this number.
        variables: Number of variables and parts of variables on the server.
        rows: Number of table rows on the server.
        bytes_held: Bytes of values, and of tables with the state of their optimizers.
        bytes_in: Bytes of received arrays, including the last figures of earlier servers.
        bytes_out: Bytes of sent arrays, including the last figures of earlier servers.
    """

    server: int
    state: str = "silent"
    age_s: float | None = None
    restarts: int = 0
    variables: int = 0
    rows: int = 0
    bytes_held: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class ServerSurvey:
    """Asks all servers of a strategy for their figures, again and again."""

    def __init__(self, servers: Servers):
        self._servers, self._engine = servers, servers.engine
        self._seen = [_Seen(i) for i in range(len(servers))]

    def ask(self, timeout_s: float) -> list[ServerFigures]:
        """The figures of each server that answers within `timeout_s` in all, else its last ones."""
        now_s = self._engine.concurrency.now_s
        limit_s, found = now_s() + timeout_s, []
        places = self._servers.look()
        for seen, (actor, restarts) in zip(self._seen, places, strict=True):
            if restarts == actor.incarnation:
                seen.ask(self._engine, actor)
        for seen, (actor, restarts) in zip(self._seen, places, strict=True):
            state = "starts"
            if restarts == actor.incarnation:
                state = self._hear(seen, max(limit_s - now_s(), 0.0))
            found.append(seen.figures(state, restarts, now_s()))
        return found

    def _hear(self, seen: _Seen, timeout_s: float) -> str:
        try:
            facts = self._engine.result(seen.call, timeout_s)
        except ResultTimeout:
            return "silent"
        except Exception:  # who needs it hears why, and replaces it
            seen.call = None
            return "dead"
        seen.hear(facts, self._engine.concurrency.now_s())
        return "answers"


class _Seen:
    """What is known of one server."""

    def __init__(self, index: int):
        self.index = index
        self.call: Future | None = None
        self._facts: Mapping[str, Any] = {}
        self._before = {"bytes_in": 0, "bytes_out": 0}
        self._heard_s: float | None = None

    def ask(self, engine: Any, actor: Actor) -> None:
        """Calls it, unless a call is under way."""
        if self.call is None or self.call.actor != actor:
            self.call = engine.call(actor, "measure")

    def hear(self, facts: Mapping[str, Any], now_s: float) -> None:
        """Takes its answer."""
        if facts["incarnation"] != self._facts.get("incarnation", facts["incarnation"]):
            for name in self._before:  # the counts of the new one begin at 0
                self._before[name] += self._facts[name]
        self.call, self._facts, self._heard_s = None, facts, now_s

    def figures(self, state: str, restarts: int, now_s: float) -> ServerFigures:
        """The last figures."""
        facts = {name: self._facts.get(name, 0) for name in ("variables", "rows")}
        traffic = {name: x + self._facts.get(name, 0) for name, x in self._before.items()}
        age_s = None if self._heard_s is None else now_s - self._heard_s
        held = self._facts.get("bytes", 0)
        return ServerFigures(
            self.index, state, age_s, restarts, bytes_held=held, **facts, **traffic
        )
