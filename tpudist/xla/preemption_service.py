"""SIGTERM where JAX has taken it over: it ends a program that never asks whether it has come.

`jax.distributed.initialize` installs a handler that notes SIGTERM for
`multihost_utils.reached_preemption_sync_point`, and does nothing else: a program that does not
call that function could not be ended by SIGTERM at all. One that does goes on as JAX has it.
"""

import ctypes
import logging
import signal
from collections.abc import Callable
from typing import Any

from tpudist.xla import internals

EXIT_CODE = 143
"""128 plus the number of SIGTERM."""
_log = logging.getLogger("tpudist")


class SigtermHandler:
    """Ends the program, or passes SIGTERM on to JAX's service where that is asked for it."""

    def __init__(self, on_end: Callable[[], None]):
        """Takes over SIGTERM, in the main thread and where no handler of Python's is there.

        Args:
            on_end: Called in the main thread before the program ends.
        """
        self._on_end = on_end
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return  # somebody else ends the program, or does not want it to end
        self._note = _handler_in_c()
        self._polls = internals.count_preemption_polls()
        try:
            signal.signal(signal.SIGTERM, self)
        except ValueError:  # another thread than the main one
            _log.info("SIGTERM is JAX's: the strategy was not made in the main thread.")

    def __call__(self, number: int, frame: Any) -> None:
        """The handler, as `signal.signal` calls it."""
        if self._polls() and self._note is not None:
            self._note(number)
            return
        self._on_end()
        raise SystemExit(EXIT_CODE)


def _handler_in_c() -> Callable[[int], Any] | None:
    """The function that C calls now at SIGTERM; None where there is none."""
    found = ctypes.create_string_buffer(512)  # larger than any `struct sigaction`
    if ctypes.CDLL(None).sigaction(int(signal.SIGTERM), None, found):
        return None
    address = ctypes.c_void_p.from_buffer(found).value  # its first member, on Linux and on macOS
    if address in (None, 0, 1):  # SIG_DFL, SIG_IGN
        return None
    return ctypes.CFUNCTYPE(None, ctypes.c_int)(address)
