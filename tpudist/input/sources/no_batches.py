"""Warns of a dataset without batches, once: a loop over it does no step."""

import logging
import weakref
from typing import Any

_log = logging.getLogger("tpudist")
_warned: "weakref.WeakSet[Any]" = weakref.WeakSet()

NO_BATCHES = (
    "A pass through the dataset gave no batches, so there is nothing to do. If it reads from an "
    "iterator that is exhausted, pass a function that makes a new one for each pass."
)


class NoBatches(ValueError):
    """The shapes of a dataset's batches are not known, because it has none.

    Remedy: give a dataset with at least one batch, or do not ask for its `element_spec`. A loop
    over it does no step and warns.
    """

    def __init__(self) -> None:
        """Has the text of the warning."""
        super().__init__(NO_BATCHES)


def warn(feed: Any, *sources: Any, num_dropped: int = 0) -> None:
    """Warns, once for each feed, that a pass through its sources gave no batches.

    Args:
        feed: The feed of a distributed dataset.
        sources: Its sources of batches.
        num_dropped: Number of partial batches that were left out.
    """
    if feed not in _warned:
        _warned.add(feed)
        reasons = dict.fromkeys(_describe(source, num_dropped) for source in sources)
        _log.warning("%s", " ".join(reasons) or NO_BATCHES)


def _describe(source: Any, num_dropped: int) -> str:
    if num_dropped:
        return (
            f"All {num_dropped} batches of the dataset were partial and were dropped, so there is "
            "nothing to do. Use partial_batch='pad'."
        )
    num_examples = getattr(source, "num_examples", None)
    if num_examples is None:
        return NO_BATCHES
    told, kind = "A pass through the dataset gave no batches", type(source).__name__
    size = source.global_batch_size or 1
    if not num_examples:
        return f"{told}: the {kind} has no examples. There is nothing to do."
    if source.drops_remainder and num_examples < size:
        return (
            f"{told}: it has {num_examples} examples, fewer than a full batch of {size}, and a "
            "last batch that is not full is dropped. Use a global batch of at most "
            f"{num_examples}, or keep the last batch."
        )
    return f"{told}: this shard of the {kind} has none. There is nothing to do."
