"""Error about a dataset without batches."""

NO_BATCHES = (
    "A pass through the dataset gave no batches, so there is nothing to do. If it reads from an "
    "iterator that is exhausted, pass a function that makes a new one for each pass."
)


class NoBatches(ValueError):
    """The shapes of a dataset's batches are unknown, because it has no batches.

    Remedy: pass a dataset with at least one batch, or do not read its `element_spec`. A loop over
    it runs no step and warns.
    """

    def __init__(self) -> None:
        super().__init__(NO_BATCHES)
