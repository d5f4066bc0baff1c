"""Messages of `tpudist.experimental.rpc`: nested structures of arrays, as bytes.

A line of JSON has the structure, and the bytes of the arrays follow (`ps/record_file.py`). Messages
contain no code, so a receiver never runs code of the sender.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tpudist.array_types import PyTree, is_named_tuple
from tpudist.ps import record_file

# Nested lists, tuples and dicts of leaves; dict keys are strings.
Nest: TypeAlias = PyTree
# The same as JSON; see `_describe`.
Structure: TypeAlias = int | list[Any]


def encode(facts: Mapping[str, Any], value: Nest) -> bytes:
    """Encodes facts, which must be JSON, and nested lists, tuples and dicts of leaves.

    Leaves are arrays, numbers, strings and None.

    Raises:
        TypeError: If `value` contains anything else.
    """
    arrays: dict[str, np.ndarray] = {}
    structure = _describe(value, arrays)
    return record_file.encode({**facts, "structure": structure}, arrays)


def decode(message: bytes) -> tuple[dict[str, Any], Nest]:
    """Decodes a message; all numbers in its value are NumPy arrays.

    Raises:
        ValueError: If the bytes are not a message.
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
    """Returns the leaves of lists, tuples and dicts, with sorted keys as in TensorFlow."""
    if isinstance(value, list | tuple):
        return [leaf for x in value for leaf in flatten(x)]
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in flatten(value[key])]
    return [value]


def pack(like: Nest, leaves: Sequence[Any]) -> Nest:
    """Returns a structure like another one with these leaves, in the order of `flatten`."""
    left = iter(leaves)

    def fill(like: Nest) -> Nest:
        if is_named_tuple(like):
            return type(like)(*map(fill, like))
        if isinstance(like, list | tuple):
            return type(like)(map(fill, like))
        if isinstance(like, dict):
            found = {key: fill(like[key]) for key in sorted(like)}
            return {key: found[key] for key in like}
        return next(left)

    return fill(like)


def _describe(value: Nest, arrays: dict[str, np.ndarray]) -> Structure:
    """Returns the structure as JSON, and adds arrays to `arrays`.

    A number is the key of an array; a list has a kind and its contents.
    """
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
    # NumPy gives JAX's dtypes, such as bfloat16, the kind V of raw bytes and records.
    if array.dtype.kind not in "biufcV" or array.dtype.type is np.void:
        raise TypeError(
            f"{_name(value)} cannot be sent. Send lists, tuples and dicts of arrays of numbers, "
            f"numbers, strings and None."
        )
    arrays[str(len(arrays))] = array
    return len(arrays) - 1


def _rebuild(structure: Structure, arrays: Mapping[str, np.ndarray]) -> Nest:
    if isinstance(structure, int):
        # A copy, because the message is read-only, and functions may write to their arguments.
        return arrays[str(structure)].copy()
    kind, *contents = structure
    if kind == "none":
        return None
    if kind == "text":
        return str(contents[0])
    if kind in ("list", "tuple"):
        found = [_rebuild(x, arrays) for x in contents[0]]
        return found if kind == "list" else tuple(found)
    if kind == "dict":
        return {str(key): _rebuild(x, arrays) for key, x in contents[0]}
    raise ValueError(f"unknown kind {kind!r}")


def _name(value: object) -> str:
    return f"{value!r:.100} of type {type(value).__name__}"
