"""Makes a source of batches from a dataset of a user or of another library.

A library is known by the name of a class's module, so none is imported unless your program does.
"""

import sys
from collections.abc import Iterable
from typing import Any, TypeGuard

import jax
import numpy as np

from tpudist.input.sources.indexed_dataset import IndexedDataset
from tpudist.input.sources.iterable import IterableSource, Source
from tpudist.input.sources.records import Records, libraries_of


def to_source(dataset: object) -> IndexedDataset | IterableSource:
    """Returns the source of batches for a dataset.

    Raises:
        ValueError: If the dataset is not batched.
        TypeError: If it is not a dataset of batches.
    """
    if isinstance(dataset, IndexedDataset):
        if dataset.global_batch_size is None:
            raise ValueError(
                f"The {type(dataset).__name__} is not batched. Distribute "
                f"dataset.batch(global_batch_size)."
            )
        return dataset
    class_name = type(dataset).__name__
    if isinstance(dataset, dict | str | bytes | np.ndarray | jax.Array):
        raise TypeError(
            f"A {class_name} is not a dataset of batches. For arrays in memory, distribute "
            f"strategy.experimental_make_numpy_dataset(arrays).batch(global_batch_size)."
        )
    if (found := adapt_library_dataset(dataset)) is not None:
        return found
    if not _is_source(dataset):
        raise TypeError(
            f"A {class_name} is not a dataset. Pass an iterable of global batches (pytrees of "
            "arrays), or a function that returns one for each pass."
        )
    return IterableSource(dataset, adapt_library_dataset)


def _is_source(dataset: object) -> TypeGuard[Source]:
    return isinstance(dataset, Iterable) or callable(dataset)


def adapt_library_dataset(dataset: Any) -> IterableSource | None:
    """Returns a source for a dataset of a known library; None for any other object.

    Raises:
        TypeError: If its elements are not batches of numbers.
    """
    libraries = libraries_of(dataset)
    if "grain" in libraries:
        from tpudist.input.sources import grain_source

        if isinstance(dataset, grain_source.GrainDataset):
            return grain_source.GrainSource(dataset)
    if "tensorflow" in libraries and isinstance(dataset, sys.modules["tensorflow"].data.Dataset):
        from tpudist.input.sources import tf_data

        return tf_data.TfDataSource(dataset)
    # Classes of PyTorch and Hugging Face are known by a method: loaders of torchdata and streams of
    # `datasets` have no common base class with the others.
    if libraries & {"torch", "torchdata"} and hasattr(dataset, "collate_fn"):
        from tpudist.input.sources import torch_loader

        return torch_loader.TorchSource(dataset)
    if "datasets" in libraries and hasattr(dataset, "with_format"):
        from tpudist.input.sources import hugging_face

        return hugging_face.batches(dataset)
    if isinstance(dataset, Records):
        # Datasets of these libraries can be iterated over, but yield examples, not batches.
        if not isinstance(dataset, Iterable) or libraries & {"torch", "datasets"}:
            raise TypeError(
                f"A {type(dataset).__name__} holds examples, not batches. Distribute "
                f"tpudist.input.from_records(dataset).batch(global_batch_size)."
            )
    return None
