"""Pytrees that are nested too deep for JAX, which takes them apart by recursion.

JAX raises a RecursionError or a SystemError, and leaves Python's count of recursions wrong for the
rest of the program. So the depth is looked at before.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

MAX_DEPTH = 1000
"""Levels of a pytree: far above those of any model, and below what JAX can take apart."""

# Types without children; those of JAX's arrays are added when they are seen.
_LEAVES: set[type] = {bool, bytes, complex, float, int, str, type(None), np.ndarray}


def check_depth(tree: Any, what: str, is_leaf: Callable[[Any], bool] = lambda _: False) -> None:
    """Refuses a pytree that is nested too deep.

    Args:
        tree: Any pytree.
        what: Name of the tree, for the message.
        is_leaf: Whether a node is not taken apart.

    Raises:
        ValueError: If `tree` has more than 1000 levels.
    """
    level = [tree]
    for _ in range(MAX_DEPTH + 1):
        below: dict[int, Any] = {}  # each node once: the number of paths to it may be exponential
        for node in level:
            children = () if type(node) in _LEAVES or is_leaf(node) else _children(node)
            if not _LEAVES.issuperset(map(type, children)):
                below.update((id(x), x) for x in children if type(x) not in _LEAVES)
        if not below:
            return
        level = list(below.values())
    raise ValueError(
        f"{what} is nested more than {MAX_DEPTH} levels deep, or contains itself. JAX flattens "
        "pytrees by recursion. Put the arrays into one list or dict, or stack arrays of the same "
        "shape."
    )


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    if isinstance(node, list | tuple):
        return node
    if isinstance(node, jax.Array):
        _LEAVES.add(type(node))
        return ()
    taken_apart = jax.tree_util.default_registry.flatten_one_level(node)
    return () if taken_apart is None else tuple(taken_apart[0])
