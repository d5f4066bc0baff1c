"""Containers that JAX does not know, among what a function returns: taken apart and made again.

Dataclasses, and subclasses of mappings, lists and tuples, are leaves of JAX's trees unless they are
registered with it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tpudist.values.per_replica import PerReplica, is_distributed
from tpudist.xla.traces import is_traced


@jax.tree_util.register_pytree_node_class
class _Record:
    """What a container holds, as a node of a tree; taken out of its tree it is a container."""

    def __init__(self, cls: type, keys: tuple[Any, ...], values: list[Any]):
        self.cls, self.keys, self.values = cls, keys, values

    def tree_flatten(self):
        return tuple(self.values), (self.cls, self.keys)

    @classmethod
    def tree_unflatten(cls, what, children):
        made, keys = what
        if issubclass(made, Mapping):
            return made(dict(zip(keys, children, strict=True)))  # type: ignore[call-arg]
        if issubclass(made, list | tuple):
            return made(children)
        instance = object.__new__(made)
        for name, value in zip(keys, children, strict=True):
            object.__setattr__(instance, name, value)
        return instance


def unpack(
    tree: Any, is_leaf: Callable[[Any], bool], is_value: Callable[[Any], bool] = is_traced
) -> tuple[Any, bool]:
    """`tree` with unknown containers that hold values (traced ones) as nodes; if there are any."""
    found = []

    def one(x: Any) -> Any:
        if is_leaf(x) or not holds(x, is_value):
            return x
        found.append(x)
        held = _items(x)
        values = [jax.tree.map(one, value, is_leaf=is_leaf) for _, value in held]
        return _Record(type(x), tuple(key for key, _ in held), values)

    return jax.tree.map(one, tree, is_leaf=is_leaf), bool(found)


def holds(value: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether a container that is a leaf to JAX holds a value that is `wanted`."""
    for _, held in _items(value):
        for x in jax.tree.leaves(held, is_leaf=is_distributed):
            if wanted(x.array if isinstance(x, PerReplica) else x) or holds(x, wanted):
                return True
    return False


def _items(value: Any) -> list[tuple[Any, Any]]:
    """What a container holds by key; nothing if it is none."""
    if isinstance(value, type | PerReplica):
        return []
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []
