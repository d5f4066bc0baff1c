"""Errors that programs catch by name: what is raised of `tf.errors`, and tpudist's own."""

__all__ = [
    "CancelledError",
    "DeadlineExceededError",
    "OutOfRangeError",
    "ProcessFailedError",
    "ProcessesDifferError",
    "StartupError",
    "UnavailableError",
]


class CancelledError(RuntimeError):
    """A function that was scheduled has not run, since another one had failed before.

    Or a call was given up.

    As `tf.errors.CancelledError`.
    """


class DeadlineExceededError(TimeoutError):
    """A call to another program has taken longer than it may.

    As `tf.errors.DeadlineExceededError`.
    """


class OutOfRangeError(StopIteration):
    """An iterator is at its end.

    Also a `StopIteration`, so a program may catch either. As `tf.errors.OutOfRangeError`.
    """


class ProcessFailedError(RuntimeError):
    """Another process of the run has raised, or was killed or stopped: this one cannot go on.

    Says which process, and shows its traceback if it had one. Raised at the next line of Python;
    a process that waits for the other one's part of a collective cannot raise, and ends.
    As `tf.errors.UnavailableError` where a worker is lost.
    """


class ProcessesDifferError(RuntimeError):
    """The processes of a run were about to do different things, or with different values.

    Raised on each of them: their collectives would combine what does not belong together, without
    an error, or wait for ever. Says which processes differ, in what, and where. tf.distribute has
    none; its collectives fail where shapes or dtypes differ.
    """


class StartupError(RuntimeError):
    """The processes of a run do not come together: one is missing, or does not fit.

    Or the address of the first one cannot be used. Says which, where, and for how long was waited.
    """


class UnavailableError(RuntimeError):
    """A parameter server has died, and what it held was kept nowhere.

    Or a server that was called has gone. As `tf.errors.UnavailableError`.
    """
