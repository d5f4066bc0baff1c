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

    Remedy: look at the error of the function that had failed, which `join` or `schedule` has
    raised, and schedule this one again.
    """


class DeadlineExceededError(TimeoutError):
    """A call to another program has taken longer than it may.

    As `tf.errors.DeadlineExceededError`.

    Remedy: call again, with a longer timeout if the other program is slow rather than gone.
    """


class OutOfRangeError(StopIteration):
    """An iterator is at its end.

    Also a `StopIteration`, so a program may catch either. As `tf.errors.OutOfRangeError`.

    Remedy: none is needed at the end of an epoch; `iter` of the dataset begins the next one.
    """


class ProcessFailedError(RuntimeError):
    """Another process of the run has raised, or was killed or stopped: this one cannot go on.

    Says which process, and shows its traceback if it had one. Raised at the next line of Python;
    a process that waits for the other one's part of a collective cannot raise, and ends.
    As `tf.errors.UnavailableError` where a worker is lost.

    Remedy: correct what the traceback shows; of a machine that was lost, start the run again,
    which `tpudist launch --restarts` does by itself.
    """


class ProcessesDifferError(RuntimeError):
    """The processes of a run were about to do different things, or with different values.

    Raised on each of them: their collectives would combine what does not belong together, without
    an error, or wait for ever. Says which processes differ, in what, and where. tf.distribute has
    none; its collectives fail where shapes or dtypes differ.

    Remedy: make the processes do at the named line what the message says they do not: the same
    seed, order, shapes and number of steps.
    """


class StartupError(RuntimeError):
    """The processes of a run do not come together: one is missing, or does not fit.

    Or the address of the first one cannot be used. Says which, where, and for how long was waited.

    Remedy: start the process that is named, let its host and port be reached from the others,
    or name another address; `tpudist doctor` looks before a run.
    """


class UnavailableError(RuntimeError):
    """A parameter server has died, and what it held was kept nowhere.

    Or a server that was called has gone. As `tf.errors.UnavailableError`.

    Remedy: give the strategy a folder for its servers' log (`log=`), or restore a checkpoint;
    of a server that is called, start it again.
    """
