"""PendingRows: rows of a table that servers look up while the caller continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpudist.array_types import Shape
from tpudist.context.closure_place import current_place
from tpudist.engine.engine import ActorDied, Engine, Future
from tpudist.errors import UnavailableError
from tpudist.ps.servers import MAX_DEATHS, Servers, gather
from tpudist.ps.tables.table_options import TableOptions
from tpudist.ps.worker_session import WorkerSession


class PendingRows:
    """Requested rows of a table; created by `Table.prefetch`.

    Args:
        table: Number of the table.
        options: Options of the table.
        ids: `[n]` int64.
        shape: Shape of the ids in the result.
        places: Servers of the ids, each with the positions of its ids; None for all ids.
        create: Whether to create rows for missing ids.
        find_servers: Called in the program, outside of workers; returns the servers.
    """

    def __init__(
        self,
        table: int,
        options: TableOptions,
        ids: np.ndarray,
        shape: Shape,
        places: Sequence[tuple[int, np.ndarray | None]],
        *,
        create: bool,
        find_servers: Callable[[], Servers],
    ):
        self._table, self._options, self._places = table, options, places
        self._ids, self._shape = ids, shape
        self._create, self._find_servers = create, find_servers
        self._request()

    def get(self) -> np.ndarray:
        """Waits for the rows, and returns them: `[*shape, dim]`."""
        try:
            rows_of = gather(self._engine, self._calls)
        except ActorDied as died:
            rows_of = self._request_again(died)
        dim = self._options.dim
        if len(self._places) == 1 and self._places[0][1] is None:
            rows = rows_of[0]
        else:
            rows = np.empty((self._ids.size, dim), self._options.dtype)
            for server, positions in self._places:
                rows[positions] = rows_of[server]
        return rows.reshape(*self._shape, dim)

    def _request(self) -> None:
        session = _find_session()
        if session is not None:
            self._engine: Engine = session.engine
            actors = session.servers
        else:
            servers = self._find_servers()
            self._engine, actors = servers.engine, servers.actors
        self._calls: dict[int, Future] = {}
        for server, positions in self._places:
            ids = self._ids if positions is None else self._ids[positions]
            self._calls[server] = self._engine.call(
                actors[server], "pull_table", self._table, ids, self._create
            )

    def _request_again(self, died: ActorDied) -> dict[int, Any]:
        """Requests the rows again after a server was lost.

        Raises:
            ActorDied: On a worker, if the dispatcher has not replaced the server yet.
            UnavailableError: In the program, if servers die repeatedly, or have no log.
        """
        if _find_session() is not None:
            # On a worker. The dispatcher replaces servers: if it has done so since `prefetch`, the
            # session has the successor. Otherwise this second request raises `ActorDied`, which
            # ends the closure; the closure then runs again.
            self._request()
            return gather(self._engine, self._calls)
        for _ in range(MAX_DEATHS - 1):
            self._find_servers().replace(died)
            self._request()
            try:
                return gather(self._engine, self._calls)
            except ActorDied as again:
                died = again
        raise UnavailableError(
            f"{died} It is the last of {MAX_DEATHS} servers in a row that died during a lookup of "
            f"{self._ids.size} rows, which seems to be the cause. Give servers more memory, use "
            f"more of them, or look up fewer rows at a time."
        ) from died


def _find_session() -> WorkerSession | None:
    """Returns the session of this thread's worker; None outside of workers."""
    place = current_place()
    return None if place is None else place.session
