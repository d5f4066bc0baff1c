"""Finds the source of batches for what another library made, which is not imported before that."""

import sys
from typing import Any


def adapted(dataset: Any) -> Any:
    """A source of the batches of a dataset of another library; None if it is of none we know.

    Raises:
        TypeError: It gives no batches, or no numbers.
    """
    libraries = {kind.__module__.split(".")[0] for kind in type(dataset).__mro__}
    if "grain" in libraries:
        from tpudist.input import grain_source

        if grain_source.is_grain(dataset):
            return grain_source.GrainSource(dataset)
    if "tensorflow" in libraries and isinstance(dataset, sys.modules["tensorflow"].data.Dataset):
        from tpudist.input import tf_data

        return tf_data.TfDataSource(dataset)
    if libraries & {"torch", "torchdata"} and hasattr(dataset, "collate_fn"):
        from tpudist.input import torch_loader

        return torch_loader.TorchSource(dataset)
    if "datasets" in libraries and hasattr(dataset, "with_format"):
        from tpudist.input import hugging_face

        return hugging_face.batches(dataset)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        if not hasattr(dataset, "__iter__") or "torch" in libraries or "datasets" in libraries:
            raise TypeError(
                f"A {type(dataset).__name__} holds examples, not batches. Distribute "
                f"tpudist.input.from_records(dataset).batch(global_batch_size)."
            )
    return None
