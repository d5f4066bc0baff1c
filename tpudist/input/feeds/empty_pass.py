"""Warning about a pass through a distributed dataset that returned no batches."""

import logging
import weakref

from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.input.sources.no_batches import NO_BATCHES

_log = logging.getLogger("tpudist")
_warned_feeds: "weakref.WeakSet[object]" = weakref.WeakSet()


def warn_of_empty_pass(feed: object, *sources: object, num_dropped: int = 0) -> None:
    """Warns, once per feed, that a pass through its sources returned no batches.

    Args:
        feed: Feed of a distributed dataset.
        sources: Sources of the feed.
        num_dropped: Number of partial batches that were dropped.
    """
    if feed not in _warned_feeds:
        _warned_feeds.add(feed)
        reasons = dict.fromkeys(_describe(source, num_dropped) for source in sources)
        _log.warning("%s", " ".join(reasons) or NO_BATCHES)


def _describe(source: object, num_dropped: int) -> str:
    if num_dropped:
        return (
            f"All {num_dropped} batches of the dataset were partial and were dropped, so there is "
            "nothing to do. Use partial_batch='pad'."
        )
    if not isinstance(source, IndexedDataset):
        return NO_BATCHES
    problem, num_examples = "A pass through the dataset gave no batches", source.num_examples
    size = source.global_batch_size or 1
    if not num_examples:
        return f"{problem}: the {source.name} has no examples. There is nothing to do."
    if source.drops_remainder and num_examples < size:
        return (
            f"{problem}: it has {num_examples} examples, fewer than a full batch of {size}, and a "
            "last batch that is not full is dropped. Use a global batch of at most "
            f"{num_examples}, or keep the last batch."
        )
    return f"{problem}: this shard of the {source.name} has none. There is nothing to do."
