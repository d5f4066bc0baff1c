"""Errors that programs catch by name: those of `tf.errors` that tpudist raises, and its own."""

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
    """A scheduled function did not run, because another function had failed before.

    Also raised if a call was given up. Matches `tf.errors.CancelledError`.

    Remedy: correct the error of the function that failed, which `join` or `schedule` has raised.
    Then schedule this function again.
    """


class DeadlineExceededError(TimeoutError):
    """A call to another program took longer than its timeout.

    Matches `tf.errors.DeadlineExceededError`.

    Remedy: call again. If the other program is slow rather than gone, use a longer timeout.
    """


class OutOfRangeError(StopIteration):
    """An iterator is at its end.

    It is also a `StopIteration`, so a program may catch either. Matches
    `tf.errors.OutOfRangeError`.

    Remedy: at the end of an epoch, do nothing; `iter(dataset)` begins the next epoch.
    """


class ProcessFailedError(RuntimeError):
    """Another process of the run has failed or stopped, so this process cannot continue.

    The message names the process, and shows its traceback if it had one. The error is raised at the
    next line of Python. A process that waits for the failed one in a collective cannot raise; it
    exits. Matches `tf.errors.UnavailableError` if a worker is lost.

    Remedy: correct the error in the traceback. If a machine was lost, start the run again;
    `tpudist launch --restarts` does so automatically.
    """


class ProcessesDifferError(RuntimeError):
    """The processes of a run were about to execute different operations or use different values.

    Every process raises this error. Without it, their collectives would wait forever, or combine
    unrelated values without an error. The message says which processes differ, in what, and where.
    tf.distribute has no such error; its collectives fail only if shapes or dtypes differ.

    Remedy: make the difference in the message disappear at the named line: use the same seed,
    order, shapes and number of steps in all processes.
    """


class StartupError(RuntimeError):
    """The processes of a run could not connect: one is missing, or its configuration differs.

    Also raised if the address of the first process cannot be used. The message says which process,
    where, and how long tpudist waited.

    Remedy: start the named process, make its host and port reachable from the other hosts, or
    configure another address. `tpudist doctor` checks this before a run.
    """


class UnavailableError(RuntimeError):
    """A parameter server died, and no copy of its state exists.

    Also raised if a server that was called is gone. Matches `tf.errors.UnavailableError`.

    Remedy: give the strategy a folder for the log of its servers (`log=`), or restore a checkpoint.
    If you called a server yourself, start it again.
    """
