"""The flat inputs of a compiled step: which arrays there are, where they live, how to take some."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tpudist.xla import placement


def positions(values: Sequence[Any]) -> list[list[int]]:
    """For each input, which may be a whole pytree, the positions of its arrays among all arrays."""
    found, position = [], 0
    for value in values:
        size = 1 if hasattr(value, "shape") else len(jax.tree.leaves(value))
        found.append(list(range(position, position + size)))
        position += size
    return found


def on_host(values: Sequence[Any]) -> list[int]:
    """The positions of the arrays that live in the host's memory."""
    return [i for i, x in enumerate(jax.tree.leaves(values)) if placement.on_host(x)]


def taker(indices: Sequence[int]) -> Callable[[list[Any]], list[Any]]:
    """A fast way to take the elements at `indices`."""
    if list(indices) == list(range(len(indices))):
        end = len(indices)
        return lambda values: values[:end]
    if len(indices) > 1:
        getter = operator.itemgetter(*indices)
        return lambda values: list(getter(values))
    return lambda values: [values[i] for i in indices]


def pinned(value: Any, mesh: Any) -> Any:
    """The sharding that new state must keep: its old one, so that the next call hits the cache."""
    sharding = getattr(value, "sharding", None)
    on_mesh = isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh == mesh.mesh
    return sharding if on_mesh else None
