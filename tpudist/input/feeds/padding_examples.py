"""Examples of batches in messages: a process without a batch needs one, to pad its replicas."""

import base64
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.input.feeds.batch import Batch


def encode_batch(batch: Batch) -> dict[str, Any] | None:
    """Returns a batch as values of JSON; None if its structure cannot be serialized."""
    try:
        structure = batch.treedef.serialize_using_proto()
    except ValueError:  # a registered class, not only dicts, lists and tuples
        return None
    return {
        "structure": base64.b64encode(structure).decode(),
        "leaves": [
            [str(x.dtype), list(x.shape), base64.b64encode(x.tobytes()).decode()]
            for x in batch.leaves
        ],
        "rows": batch.num_rows,
    }


def decode_batch(encoded: dict[str, Any] | None, sender: int) -> Batch:
    """Returns the batch that `encode_batch` of process `sender` has encoded.

    Raises:
        ValueError: If it could not be encoded.
    """
    if encoded is None:
        raise ValueError(
            "A process has no batch, so its replicas need padding with the structure of process "
            f"{sender}'s batches, but the classes in that structure cannot be sent to another "
            "process. Give every process at least one batch, or use batches of dicts, lists and "
            "tuples."
        )
    treedef = jax.tree_util.PyTreeDef.deserialize_using_proto(
        jax.tree_util.default_registry, base64.b64decode(encoded["structure"])
    )
    leaves = [
        np.frombuffer(base64.b64decode(data), jnp.dtype(dtype)).reshape(shape)
        for dtype, shape, data in encoded["leaves"]
    ]
    return Batch(leaves, treedef, encoded["rows"])
