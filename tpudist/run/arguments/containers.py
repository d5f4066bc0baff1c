"""Containers that JAX cannot flatten, in the result of a function: taken apart, and built again.

Dataclasses, and subclasses of mappings, lists and tuples, are leaves of JAX's trees unless they are
registered with JAX.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tpudist.array_types import PyTree
from tpudist.values.per_replica import PerReplica, is_distributed
from tpudist.xla.traces import is_traced


@jax.tree_util.register_pytree_node_class
class _ContainerNode:
    """A pytree node with the contents of a container; unflattening it builds the container.

    `arguments` are those that its constructor takes before the contents.
    """

    def __init__(self, cls: type, arguments: tuple, keys: tuple[Any, ...], values: list[Any]):
        self.cls, self.arguments, self.keys, self.values = cls, arguments, keys, values

    def tree_flatten(self):
        return tuple(self.values), (self.cls, self.arguments, self.keys)

    @classmethod
    def tree_unflatten(cls, aux: tuple[type, tuple, tuple[Any, ...]], children: Any) -> Any:
        container, arguments, keys = aux
        if issubclass(container, Mapping):
            return container(*arguments, dict(zip(keys, children, strict=True)))  # type: ignore[call-arg]
        if issubclass(container, list | tuple):
            return container(children)
        # A dataclass: past its constructor, which may not accept the fields, and past `frozen`.
        instance = object.__new__(container)
        for name, value in zip(keys, children, strict=True):
            object.__setattr__(instance, name, value)
        return instance


def unpack(
    tree: PyTree, is_leaf: Callable[[Any], bool], is_value: Callable[[Any], bool] = is_traced
) -> PyTree:
    """Returns `tree` with unknown containers of values as nodes.

    Args:
        is_leaf: Whether an object stays whole.
        is_value: Whether an object is a value that makes its container a node. By default, traced
            values.
    """

    def open_container(x: Any) -> Any:
        if is_leaf(x) or not contains(x, is_value):
            return x
        items = _items(x)
        values = [jax.tree.map(open_container, value, is_leaf=is_leaf) for _, value in items]
        arguments = (x.default_factory,) if isinstance(x, collections.defaultdict) else ()
        return _ContainerNode(type(x), arguments, tuple(key for key, _ in items), values)

    return jax.tree.map(open_container, tree, is_leaf=is_leaf)


def contains(container: object, is_wanted: Callable[[Any], bool]) -> bool:
    """Whether a container that is a leaf to JAX has a value in it for which `is_wanted` is True."""
    for _, value in _items(container):
        for x in jax.tree.leaves(value, is_leaf=is_distributed):
            array = x.array if isinstance(x, PerReplica) else x
            if is_wanted(array) or contains(x, is_wanted):
                return True
    return False


def _items(value: object) -> list[tuple[Any, Any]]:
    """Returns pairs of key and value of a container; none for other objects."""
    if isinstance(value, type | PerReplica):
        return []
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []
