"""SIGTERM where JAX has taken it over: it ends a program that never asks whether it has come.

`jax.distributed.initialize` installs a handler that notes SIGTERM for
`multihost_utils.reached_preemption_sync_point`, and does nothing else: a program that does not
call that function could not be ended by SIGTERM at all. One that does gets JAX's handler back.
"""

import ctypes
import logging
import signal
from collections.abc import Callable
from typing import Any

from tpudist.xla import internals

EXIT_PREEMPTED = 143
"""128 plus the number of SIGTERM: what a supervisor takes for a process that was asked to end."""
_MAX_BYTES = 1024  # more than any system's `struct sigaction` has
_log = logging.getLogger("tpudist")


class SigtermHandler:
    """Ends the program, unless it asks JAX's service: then SIGTERM is JAX's as before."""

    def __init__(self, on_end: Callable[[], None]):
        """Takes over SIGTERM, in the main thread and where no handler of Python's is there.

        Args:
            on_end: Called in the main thread before the program ends.
        """
        self._on_end = on_end
        # Somebody else ends the program, or does not want it to end; or there is no service.
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        if not internals.call_at_preemption_poll(self._give_back):
            return
        self._before = ctypes.create_string_buffer(_MAX_BYTES)
        if ctypes.CDLL(None).sigaction(int(signal.SIGTERM), None, self._before):
            _log.info("JAX handles SIGTERM: its handler cannot be read.")
            return
        try:
            signal.signal(signal.SIGTERM, self)
        except ValueError:  # another thread than the main one
            _log.info("JAX handles SIGTERM: the strategy was not created in the main thread.")

    def __call__(self, number: int, frame: Any) -> None:
        """The handler, as `signal.signal` calls it."""
        self._on_end()
        raise SystemExit(EXIT_PREEMPTED)

    def _give_back(self) -> None:
        """Puts JAX's handler back as it was, which Python does not know; what it is need not be."""
        if signal.getsignal(signal.SIGTERM) is self:
            ctypes.CDLL(None).sigaction(int(signal.SIGTERM), self._before, None)
