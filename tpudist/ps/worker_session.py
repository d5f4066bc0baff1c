"""WorkerSession: what one worker keeps for a strategy of servers, from closure to closure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tpudist.engine.engine import Actor, Engine
from tpudist.ps.closure_state import ClosureState, ServerCopies
from tpudist.ps.step_changes import StepChanges


class WorkerSession:
    """What one worker keeps.

    Attributes:
        strategy: The strategy of this worker, which `run` of the one of servers leads to.
        steps: The replica functions that it has run.
        engine: Where the servers live.
        servers: Who the servers are, as far as it knows.
    """

    servers: Sequence[Actor]

    def __init__(self, engine: Engine, strategy: Any, device: jax.Device | None):
        """Nothing read yet.

        Args:
            engine: Where the servers live.
            strategy: See the class.
            device: Where the worker computes.
        """
        self.strategy, self.steps = strategy, StepChanges()
        self.engine, self.servers = engine, ()
        self._copies = ServerCopies(engine, device)

    def begin(
        self,
        number: int,
        low: int,
        servers: Sequence[Actor],
        function: Callable[..., Any],
        num_scheduled: int = 0,
    ) -> ClosureState:
        """What a closure sees and does; see `ClosureState`."""
        self.servers = servers
        return ClosureState(self._copies, number, low, servers, function, num_scheduled)
