"""ServerStrategy: the strategy of a coordinator, which a package that imports this one defines."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from tpudist.engine.engine import Engine
from tpudist.ps.servers import Servers
from tpudist.ps.worker_session import WorkerSession


class ServerStrategy(Protocol):
    """The part of `tpudist.ParameterServerStrategy`, a higher layer, that coordinators use.

    Attributes:
        engine: Runs workers and servers.
        servers: The servers, which hold the variables.
        num_workers: Number of workers at the start.
        coordinator: The coordinator of the strategy, if any.
        num_numbered: Number of closures of all coordinators that the strategy has had. Servers
            identify closures by number, so a later coordinator continues the count.
    """

    engine: Engine
    servers: Servers
    num_workers: int
    coordinator: weakref.ref[Any] | None
    num_numbered: int

    def make_session_factory(self) -> Callable[[int], WorkerSession]:
        """Returns a function that creates the session of a worker; it can be sent to processes."""
        ...

    def shutdown(self) -> None:
        """Ends the servers."""
        ...
