"""What a command says when it was used wrongly: one message, without a traceback."""


class WrongUse(Exception):
    """Cannot be done as it was asked; the message says what to do.

    Remedy: the command with `--help` says what there is.
    """
