"""Makes SIGTERM end a program after JAX has replaced its handler.

`jax.distributed.initialize` installs a C handler that only records SIGTERM for
`multihost_utils.reached_preemption_sync_point`: SIGTERM would not end a program that never calls
that function. When a program does call it, JAX's handler is restored.
"""

import ctypes
import logging
import signal
from collections.abc import Callable
from types import FrameType

from tpudist.processes.exit_codes import EXIT_PREEMPTED
from tpudist.xla import internals

# Larger than `struct sigaction` on any system (152 bytes on 64-bit Linux). Its contents are only
# copied, never interpreted.
_MAX_BYTES = 1024
_log = logging.getLogger("tpudist")


class SigtermHandler:
    """Ends the program at SIGTERM, unless the program polls JAX's preemption service.

    Takes over SIGTERM if it is created in the main thread and no Python handler is installed.

    Args:
        on_end: Called in the main thread before the program ends.
    """

    def __init__(self, on_end: Callable[[], None]):
        self._on_end = on_end
        # A Python handler is the program's own decision. Without JAX's service, SIGTERM has its
        # default action.
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        if not internals.call_at_preemption_poll(self._restore):
            return
        # Python knows only handlers that Python has set. JAX's must be read and put back in C.
        self._jax_action = ctypes.create_string_buffer(_MAX_BYTES)
        if ctypes.CDLL(None).sigaction(int(signal.SIGTERM), None, self._jax_action):
            _log.info("JAX handles SIGTERM: its handler cannot be read.")
            return
        try:
            signal.signal(signal.SIGTERM, self)
        except ValueError:  # not the main thread
            _log.info("JAX handles SIGTERM: the strategy was not created in the main thread.")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGTERM, as `signal.signal` calls it."""
        self._on_end()
        raise SystemExit(EXIT_PREEMPTED)

    def _restore(self) -> None:
        """Restores JAX's handler, at the first poll of the program, unless ours was replaced."""
        if signal.getsignal(signal.SIGTERM) is self:
            ctypes.CDLL(None).sigaction(int(signal.SIGTERM), self._jax_action, None)
