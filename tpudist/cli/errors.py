"""The error of commands that print one message, without a traceback."""


class WrongUse(Exception):
    """A command cannot do its work with these options or files; the message says what to change.

    Remedy: read the help of the command (`--help`).
    """
