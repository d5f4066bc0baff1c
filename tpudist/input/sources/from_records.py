"""`from_records`: a dataset of the examples of any object with a length and indices."""

from collections.abc import Callable
from typing import Any

from tpudist.array_types import PyTree
from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.input.sources.records import RandomTransform, RecordDataset, libraries_of


def from_records(
    source: Any,
    transform: Callable[[Any], PyTree] | None = None,
    *,
    random_transform: RandomTransform | None = None,
    num_threads: int | None = None,
) -> IndexedDataset:
    """Returns a dataset of the examples of an object with `len(source)` and `source[i]`.

    The object can be a list, a Grain `MapDataset` or data source, a PyTorch dataset, or a Hugging
    Face `Dataset`. Shuffle and batch the result, then distribute it:
    `from_records(source).shuffle(seed=0).batch(256)`. Each process reads only the examples of its
    own replicas, and a position in the data is a few integers.

    Args:
        source: The object. Several threads read it at once.
        transform: Called with a record; returns a pytree of arrays. None if records are pytrees of
            arrays. It must be deterministic, or runs cannot resume exactly.
        random_transform: Called with an example and a `numpy.random.Generator`; returns another
            example, such as a random crop. The generator depends only on the shuffle's seed (0
            without one), the epoch and the number of the example. So an example changes in the
            same way in any number of processes, and after resuming. Take all random numbers from
            the generator, and do not write to the arrays of the example.
        num_threads: Number of threads that read the examples of a batch. Default: one per
            processor, at most 8. More threads help if reading waits for a disk or a network; fewer
            if `transform` computes in Python, which runs in one thread at a time.

    Raises:
        TypeError: If `source` has no length or indices, or the first example does not consist of
            numbers.
        ValueError: If the source has no end.
    """
    if type(source).__module__.split(".")[0] == "datasets":
        from tpudist.input.sources import hugging_face

        return hugging_face.examples(
            source, transform, random_transform=random_transform, num_threads=num_threads
        )
    if libraries_of(source) & {"torch", "torchvision"}:  # whose examples are tensors
        from tpudist.input.sources import torch_loader

        transform = torch_loader.convert_output(transform)
    return RecordDataset(
        source, transform, random_transform=random_transform, num_threads=num_threads
    )
