"""HeldError: an error of the program that is raised only if no lost process may be its cause."""

import logging

import jax

from tpudist.processes.host import this_host
from tpudist.processes.peer_connections import DEAD_PEER_S

_log = logging.getLogger("tpudist")
# The supervisor notices the death of a process within 0.1 s, but the loss of a host, whose kernel
# sends nothing, only after `DEAD_PEER_S`.
_HOLD_S = 1.0
_HOLD_COLLECTIVE_S = DEAD_PEER_S + 5.0


class HeldError:
    """An error of the program, and when to raise it.

    If another process was lost, the supervisor orders a new generation, and the error is forgotten.
    The network may delay that order, so a process whose collective failed asks the supervisor
    before it raises: an order that was sent earlier arrives before the answer.

    Attributes:
        error: The error.
        must_ask: Whether to ask the supervisor before the error is raised.
        waits_for_answer: Whether the supervisor was asked, and has not answered.
    """

    def __init__(self, error: BaseException):
        self.error = error
        self.must_ask, self.waits_for_answer = _may_come_from_collective(error), False
        hold_s = _HOLD_COLLECTIVE_S if self.must_ask else _HOLD_S
        self._raise_at_s = this_host().monotonic() + hold_s
        if self.must_ask:
            _log.warning(
                "A step failed. Waiting %g s to learn whether a process was lost: %s", hold_s, error
            )

    @property
    def left_s(self) -> float:
        """Seconds until it is raised, or the supervisor is asked."""
        return self._raise_at_s - this_host().monotonic()


def _may_come_from_collective(error: BaseException | None) -> bool:
    """Whether an error or its cause has the type of JAX's errors for failed collectives."""
    seen: set[int] = set()  # `raise error from error` makes an error its own cause
    while error is not None and id(error) not in seen:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
