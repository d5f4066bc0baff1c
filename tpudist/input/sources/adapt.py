"""Finds the source of batches for whatever is given to a strategy, also by another library.

A library is not imported before something of it is given.
"""

import sys
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.input.sources.iterable import IterableSource


def to_source(source: Any) -> Any:
    """What a user gave as a dataset, as a source of host batches.

    Raises:
        ValueError: It is not batched.
        TypeError: It gives no batches.
    """
    if isinstance(source, IndexedDataset):
        if source.global_batch_size is None:
            raise ValueError(
                f"The {type(source).__name__} is not batched. Distribute "
                f"dataset.batch(global_batch_size)."
            )
        return source
    kind = type(source).__name__
    if isinstance(source, dict | str | bytes | np.ndarray | jax.Array):
        raise TypeError(
            f"A {kind} is not a dataset of batches. For arrays in memory, distribute "
            f"strategy.experimental_make_numpy_dataset(arrays).batch(global_batch_size)."
        )
    if (found := adapt_library_dataset(source)) is not None:
        return found
    if not isinstance(source, Iterable) and not callable(source):
        raise TypeError(
            f"A {kind} is not a dataset. Pass an iterable of global batches (pytrees of arrays), "
            "or a function that returns one for each pass."
        )
    passes: Any = source
    return IterableSource(passes, adapt_library_dataset)


def adapt_library_dataset(dataset: Any) -> Any:
    """A source of the batches of a dataset of another library; None if it is of none we know.

    Raises:
        TypeError: It gives no batches, or no numbers.
    """
    libraries = {kind.__module__.split(".")[0] for kind in type(dataset).__mro__}
    if "grain" in libraries:
        from tpudist.input.sources import grain_source

        if grain_source.is_grain(dataset):
            return grain_source.GrainSource(dataset)
    if "tensorflow" in libraries and isinstance(dataset, sys.modules["tensorflow"].data.Dataset):
        from tpudist.input.sources import tf_data

        return tf_data.TfDataSource(dataset)
    if libraries & {"torch", "torchdata"} and hasattr(dataset, "collate_fn"):
        from tpudist.input.sources import torch_loader

        return torch_loader.TorchSource(dataset)
    if "datasets" in libraries and hasattr(dataset, "with_format"):
        from tpudist.input.sources import hugging_face

        return hugging_face.batches(dataset)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        if not hasattr(dataset, "__iter__") or "torch" in libraries or "datasets" in libraries:
            raise TypeError(
                f"A {type(dataset).__name__} holds examples, not batches. Distribute "
                f"tpudist.input.from_records(dataset).batch(global_batch_size)."
            )
    return None
