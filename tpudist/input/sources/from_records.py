"""Examples that are read one by one, from anything with a length."""

from collections.abc import Callable
from typing import Any

from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.input.sources.records import PyTree, RandomTransform, RecordDataset


def from_records(
    source: Any,
    transform: Callable[[Any], PyTree] | None = None,
    *,
    random_transform: RandomTransform | None = None,
    num_threads: int | None = None,
) -> IndexedDataset:
    """A dataset of the examples that anything with `len(source)` and `source[i]` holds.

    Such as a list, a Grain `MapDataset` or data source, a PyTorch dataset, or a Hugging Face
    `Dataset`. Shuffle and batch it, then distribute it: `from_records(source).shuffle(seed=0)
    .batch(256)`. Each process reads the examples of its own replicas only, and a position in the
    data is a few integers.

    Args:
        source: Read by several threads at once.
        transform: Makes a pytree of arrays of a record; None if records are that already. The same
            each time, or runs cannot be resumed exactly.
        random_transform: `f(example, rng)` makes another example of it, such as a random crop.
            `rng` is a `numpy.random.Generator` that is a function of the shuffle's seed (0 without
            one), the epoch and the number of the example: in any number of processes, and after
            resuming, an example is changed alike. All randomness must come from it, and what
            `f` is given is not to be written to.
        num_threads: How many threads read the examples of a batch; by default one for each
            processor, at most 8. More help where reading waits for a disk or a network; fewer where
            `transform` is Python that computes, which runs in one thread at a time.

    Raises:
        TypeError: `source` is something else, or the first example holds no numbers.
        ValueError: There are too many examples to count.
    """
    if type(source).__module__.split(".")[0] == "datasets":
        from tpudist.input.sources import hugging_face

        return hugging_face.examples(
            source, transform, random_transform=random_transform, num_threads=num_threads
        )
    if _has_tensors(source):
        from tpudist.input.sources import torch_loader

        transform = torch_loader.convert_output(transform)
    return RecordDataset(
        source, transform, random_transform=random_transform, num_threads=num_threads
    )


def _has_tensors(source: Any) -> bool:
    kinds = (kind.__module__.split(".")[0] for kind in type(source).__mro__)
    return any(kind in ("torch", "torchvision") for kind in kinds)
