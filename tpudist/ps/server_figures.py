"""ServerSurvey: asks servers for figures, without waiting for them.

A server answers one call after the other, so a busy server answers late, and a hanging server
does not answer. Until it answers, its last figures are shown with their age.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tpudist.engine.engine import Actor, Engine, Future, ResultTimeout
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
    """Asks all servers of a strategy for their figures, repeatedly."""

    def __init__(self, servers: Servers):
        self._servers, self._engine = servers, servers.engine
        self._states = [_ServerState(i) for i in range(len(servers))]

    def ask(self, timeout_s: float) -> list[ServerFigures]:
        """Returns new figures of all servers, or the last ones of a server that takes too long."""
        now_s = self._engine.concurrency.now_s
        limit_s, figures = now_s() + timeout_s, []
        actors = self._servers.peek()
        # Ask all before waiting for any. More restarts than the actor's own show that its successor
        # starts; then the actor will not answer.
        for server, (actor, restarts) in zip(self._states, actors, strict=True):
            if restarts == actor.incarnation:
                server.ask(self._engine, actor)
        for server, (actor, restarts) in zip(self._states, actors, strict=True):
            state = "starts"
            if restarts == actor.incarnation:
                state = self._receive(server, max(limit_s - now_s(), 0.0))
            figures.append(server.figures(state, restarts, now_s()))
        return figures

    def _receive(self, server: _ServerState, timeout_s: float) -> str:
        try:
            facts = self._engine.result(server.call, timeout_s)
        except ResultTimeout:
            return "silent"
        except Exception:  # the next caller of the server gets the error, and replaces it
            server.call = None
            return "dead"
        server.receive(facts, self._engine.concurrency.now_s())
        return "answers"


class _ServerState:
    """The last figures of one server, and the call that asks for new ones."""

    def __init__(self, index: int):
        self.index = index
        self.call: Future | None = None
        self._facts: Mapping[str, Any] = {}
        self._of_predecessors = {"bytes_in": 0, "bytes_out": 0}
        self._received_s: float | None = None

    def ask(self, engine: Engine, actor: Actor) -> None:
        """Calls the server, unless a call is in flight."""
        if self.call is None or self.call.actor != actor:
            self.call = engine.call(actor, "report_without_replay")

    def receive(self, facts: Mapping[str, Any], now_s: float) -> None:
        """Stores an answer."""
        if facts["incarnation"] != self._facts.get("incarnation", facts["incarnation"]):
            for name in self._of_predecessors:  # the counts of the successor begin at 0
                self._of_predecessors[name] += self._facts[name]
        self.call, self._facts, self._received_s = None, facts, now_s

    def figures(self, state: str, restarts: int, now_s: float) -> ServerFigures:
        """Returns the last figures."""
        facts = {name: self._facts.get(name, 0) for name in ("variables", "rows")}
        traffic = {name: x + self._facts.get(name, 0) for name, x in self._of_predecessors.items()}
        age_s = None if self._received_s is None else now_s - self._received_s
        held = self._facts.get("bytes", 0)
        return ServerFigures(
            self.index, state, age_s, restarts, bytes_held=held, **facts, **traffic
        )
