"""The exit code of a program whose last checkpoint was lost after its last call.

A save that fails in the background is raised by the next call. If no call follows, the program
would end with code 0, and a supervisor would take the run for complete.
"""

import atexit
import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator
from typing import Any

_lost: dict[str, str] = {}
"""The failure of the last save to each directory, unless a call raised it or a later one worked."""


def note(directory: str, failure: str) -> None:
    """Notes that the last save to `directory` has failed."""
    _lost[directory] = failure


def forget(directory: str) -> None:
    """Forgets the failure: there is a newer checkpoint."""
    _lost.pop(directory, None)


def forget_raised(directory: str) -> None:
    """Forgets the failure, which a call raises; unless it is an exit handler that calls."""
    if not _is_exiting():
        forget(directory)


@contextlib.contextmanager
def note_at_exit(directory: str) -> Iterator[None]:
    """Notes an exception of the block in an exit handler, where it has no effect."""
    try:
        yield
    except BaseException as error:
        if _is_exiting():
            note(directory, str(error))
        raise


def _is_exiting() -> bool:
    return not threading.main_thread().is_alive()


def _report() -> None:
    """At the end of the program, when all threads have ended."""
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


class _FailingStream:
    """A stream that cannot be flushed at the very end, for which Python exits with code 120.

    `os._exit` would skip later exit handlers, such as the one that shuts JAX down, and an exception
    here has no effect. Python code sees the stream as it was.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flushes the stream; fails for Python itself, which no frame of Python calls."""
        self._stream.flush()
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is None:
            raise OSError("a checkpoint was lost")


atexit.register(_report)  # when this is imported: handlers that may still save run before it
