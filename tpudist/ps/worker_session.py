"""WorkerSession: the state that a worker keeps between closures of a strategy with servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tpudist.engine.engine import Actor, Engine
from tpudist.ps.closure_state import ClosureState, ServerCopies
from tpudist.ps.step_changes import StepChanges


class WorkerSession:
    """Copies of variables, and compiled replica functions, of one worker.

    Args:
        engine: Runs the servers.
        strategy: Synchronous strategy of this worker; `run` of the strategy with servers uses it.
        device: Device on which the worker computes.

    Attributes:
        strategy: Synchronous strategy of this worker.
        steps: Replica functions that the worker has run.
        engine: Runs the servers.
        servers: Servers, as of the current closure.
    """

    def __init__(self, engine: Engine, strategy: Any, device: jax.Device | None):
        self.strategy, self.steps = strategy, StepChanges()  # `Strategy` is in a higher layer
        self.engine = engine
        self.servers: Sequence[Actor] = ()
        self._copies = ServerCopies(engine, device)

    def begin(
        self,
        number: int,
        low: int,
        servers: Sequence[Actor],
        function: Callable[..., Any],
        read_ahead_limit: int | None = None,
    ) -> ClosureState:
        """Returns the state of a closure that starts; see `ClosureState`."""
        self.servers = servers
        return ClosureState(self._copies, number, low, servers, function, read_ahead_limit)
