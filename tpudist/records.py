"""Dataclasses that JAX does not know, among what a function returns: taken apart and made again."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from tpudist.values import PerReplica, is_distributed
from tpudist.xla.compile import is_traced


@jax.tree_util.register_pytree_node_class
class _Record:
    """The fields of a dataclass instance, as a node; taken out of its tree it is an instance."""

    def __init__(self, cls: type, fields: dict[str, Any]):
        self.cls, self.fields = cls, fields

    def tree_flatten(self):
        return tuple(self.fields.values()), (self.cls, tuple(self.fields))

    @classmethod
    def tree_unflatten(cls, what, children):
        made, names = what
        instance = object.__new__(made)
        for name, value in zip(names, children, strict=True):
            object.__setattr__(instance, name, value)
        return instance


def opened(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[Any, bool]:
    """`tree` with dataclass instances that hold traced values as nodes; and if there are any."""
    found = []

    def one(x: Any) -> Any:
        if is_leaf(x) or not holds(x, is_traced):
            return x
        found.append(x)
        return _Record(type(x), {name: jax.tree.map(one, v, is_leaf=is_leaf) for name, v in _of(x)})

    return jax.tree.map(one, tree, is_leaf=is_leaf), bool(found)


def holds(value: Any, wanted: Callable[[Any], bool]) -> bool:
    """Whether a dataclass instance that is a leaf to JAX holds a value that is `wanted`."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type | PerReplica):
        return False
    for _, field in _of(value):
        for x in jax.tree.leaves(field, is_leaf=is_distributed):
            if wanted(x.array if isinstance(x, PerReplica) else x) or holds(x, wanted):
                return True
    return False


def _of(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
