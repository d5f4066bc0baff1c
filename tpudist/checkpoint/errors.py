"""The error of checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or there is none that can be trusted.

    What the program's state is, and what good checkpoints there are, has not changed.

    Remedy: free or repair the directory that is named and save again, or restore a checkpoint
    that the message calls good.
    """
