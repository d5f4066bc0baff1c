"""Makes a program exit with code 120 if its last checkpoint failed and no call raised the error.

A save that fails in the background is raised by the next call. If no call follows, the program
would end with code 0, and a supervisor would take the run for complete.
"""

import atexit
import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

# Directory -> failure of the last save to it, unless a call raised it or a later save succeeded.
_lost: dict[str, str] = {}


def note(directory: str, failure: str) -> None:
    """Records that the last save to `directory` failed."""
    _lost[directory] = failure


def forget(directory: str) -> None:
    """Forgets a failure, because a newer checkpoint exists."""
    _lost.pop(directory, None)


def forget_raised(directory: str) -> None:
    """Forgets a failure that a call raises, except in an exit handler, where nobody sees it."""
    if not _is_exiting():
        forget(directory)


@contextlib.contextmanager
def note_at_exit(directory: str) -> Iterator[None]:
    """Records an exception of the block if an exit handler runs it, where it has no effect."""
    try:
        yield
    except BaseException as error:
        if _is_exiting():
            note(directory, str(error))
        raise


def _is_exiting() -> bool:
    return not threading.main_thread().is_alive()  # exit handlers run after its end


def _report() -> None:
    """Prints the failures and sets the exit code, at the end of the program."""
    if not _lost or sys.stderr is None:
        return
    has_failed = hasattr(sys, "last_value")  # an exception has ended the program
    code = "" if has_failed else ", so the program exits with code 120"
    for text in _lost.values():
        print(
            f"A checkpoint was lost{code}. {text}\nTo get the error earlier, close the "
            f"CheckpointManager: use `with`, or call close().",
            file=sys.stderr,
            flush=True,
        )
    if not has_failed:
        sys.stderr = _FailingStream(sys.stderr)


# An exit handler cannot set the exit code: an exception in it has no effect, and `os._exit` would
# skip later exit handlers, such as JAX's, which shuts it down. But Python exits with code 120 if
# it cannot flush a standard stream at the very end. So this stream fails that one flush, and works
# as before for all Python code.
class _FailingStream:
    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flushes the stream; raises if the interpreter itself calls it, from no Python frame."""
        self._stream.flush()
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is None:
            raise OSError("a checkpoint was lost")


# Handlers run in reverse order, so those that a program registers after the import, and which may
# still save, run before this one.
atexit.register(_report)
