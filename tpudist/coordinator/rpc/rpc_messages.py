"""What calls of `tpudist.experimental.rpc` send: nested structures of arrays, as bytes.

A line of JSON says how they are nested, and the bytes of the arrays follow (`ps/record_file.py`).
Nothing in it is code: who receives it runs none of the sender's.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tpudist.ps import record_file

Nest = Any


def encode(facts: Mapping[str, Any], value: Nest) -> bytes:
    """Facts, which are JSON, and lists, tuples and dicts of arrays, numbers, texts and None.

    Raises:
        TypeError: There is something else in it; says what.
    """
    arrays: dict[str, np.ndarray] = {}
    structure = _describe(value, arrays)
    return record_file.encode({**facts, "structure": structure}, arrays)


def decode(message: bytes) -> tuple[dict[str, Any], Nest]:
    """The facts and the value, of which all numbers are NumPy arrays.

    Raises:
        ValueError: The message is none.
    """
    try:
        facts, arrays = record_file.decode(message)
        return facts, _rebuild(facts.pop("structure"), arrays)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{len(message)} bytes are not a message of tpudist.experimental.rpc: {error!r}. Use "
            f"its clients and servers only with each other, in the same version."
        ) from None


def flatten(value: Nest) -> list[Any]:
    """All that is in lists, tuples and dicts, these by their keys in order, as in TensorFlow."""
    if isinstance(value, list | tuple):
        return [leaf for x in value for leaf in flatten(x)]
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in flatten(value[key])]
    return [value]


def pack(like: Nest, leaves: list[Any]) -> Nest:
    """The leaves in a structure, which they are taken for: none are left in the list."""
    if isinstance(like, list | tuple):
        return type(like)([pack(x, leaves) for x in like])
    if isinstance(like, dict):
        found = {key: pack(like[key], leaves) for key in sorted(like)}
        return {key: found[key] for key in like}
    return leaves.pop(0)


def _describe(value: Nest, arrays: dict[str, np.ndarray]) -> Any:
    """The structure: a number stands for an array, a text for a kind and what is in it."""
    if value is None:
        return ["none"]
    if isinstance(value, str):
        return ["text", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_describe(x, arrays) for x in value]]
    if type(value) is dict:
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"A dict has the key {wrong[0]!r}. Use only strings as keys.")
        return ["dict", [[key, _describe(x, arrays)] for key, x in value.items()]]
    try:
        array = np.asarray(value)
    except Exception as error:
        raise TypeError(
            f"{_name(value)} cannot be sent, because it is not an array: {error}"
        ) from None
    # Types that JAX brings (bfloat16) are of kind V, as raw bytes and records are.
    if array.dtype.kind not in "biufcV" or array.dtype.type is np.void:
        raise TypeError(
            f"{_name(value)} cannot be sent. Send lists, tuples and dicts of arrays of numbers, "
            f"numbers, strings and None."
        )
    arrays[str(len(arrays))] = array
    return len(arrays) - 1


def _rebuild(structure: Any, arrays: Mapping[str, np.ndarray]) -> Nest:
    if isinstance(structure, int):
        return arrays[str(structure)].copy()  # what was received cannot be written to
    kind, *inside = structure
    if kind == "none":
        return None
    if kind == "text":
        return str(inside[0])
    if kind in ("list", "tuple"):
        found = [_rebuild(x, arrays) for x in inside[0]]
        return found if kind == "list" else tuple(found)
    if kind == "dict":
        return {str(key): _rebuild(x, arrays) for key, x in inside[0]}
    raise ValueError(f"unknown kind {kind!r}")


def _name(value: Any) -> str:
    return f"{value!r:.100} of type {type(value).__name__}"
