"""The error that checkpoints raise."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or no intact checkpoint exists.

    The state of the program and the good checkpoints are unchanged.

    Remedy: Free disk space in the named directory or repair it, and save again. Or restore a
    checkpoint that the message calls good.
    """
