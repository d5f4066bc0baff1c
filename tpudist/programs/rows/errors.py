"""The errors about functions that are followed over the rows of a partial batch."""


class RowsError(ValueError):
    """A function cannot be run exactly on a padded batch.

    Remedy: rewrite the line that the message names, declare a kernel with `tpudist.rowwise`, or
    drop partial batches: `InputOptions(partial_batch='drop')`.

    Args:
        reason: The primitive that cannot be followed, and the cause.
        line: The user's line, as `file:line`; empty if it is unknown.
    """

    def __init__(self, reason: str, line: str = ""):
        self.reason, self.line = reason, line
        super().__init__(f"{reason} ({line})" if line else reason)


class NumbersLearned(Exception):
    """A batch of one row or none needs other numbers in the program, which must be created again.

    `RowProgram.check` raises it. A program that is created for these numbers of rows has learned
    the numbers, and does not raise it for them.
    """
