"""The error of commands that print one message, without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class WrongUse(Exception):
    """A command cannot do its work with these options or files; the message says what to change.

    Remedy: read the help of the command (`--help`).
    """


@contextmanager
def as_wrong_use(*errors: type[Exception]) -> Iterator[None]:
    """Turns errors of these classes into the error of commands, with the same message."""
    try:
        yield
    except errors as error:
        raise WrongUse(str(error)) from error


@contextmanager
def explain_write_errors() -> Iterator[None]:
    """Turns errors of writing files into one message.

    Raises:
        WrongUse: If a file cannot be written, or matplotlib is missing for a chart.
    """
    try:
        yield
    except OSError as error:
        where = f"{error.filename} cannot be written" if error.filename else "Writing failed"
        raise WrongUse(f"{where}: {error.strerror or error}. Pass another file.") from error
    except (ValueError, ModuleNotFoundError) as error:
        raise WrongUse(str(error)) from error
