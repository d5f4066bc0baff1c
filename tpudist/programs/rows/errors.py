"""What is raised where a function cannot be followed over the rows of a partial batch."""


class RowsError(ValueError):
    """A function cannot be run exactly on a padded batch.

    Remedy: write the line that is named otherwise, declare a kernel with `tpudist.rowwise`, or
    leave partial batches out: `InputOptions(partial_batch='drop')`.

    Attributes:
        reason: What could not be followed: a primitive and why, for people.
        line: The user's line that it comes from, as `file:line`; empty if none is known.
    """

    def __init__(self, reason: str, line: str = ""):
        """See the class."""
        self.reason, self.line = reason, line
        super().__init__(f"{reason} ({line})" if line else reason)
