"""Checks the depth of pytrees, because JAX flattens them by recursion.

For a pytree that is too deep, JAX raises RecursionError or SystemError, and Python's recursion
counter stays wrong for the rest of the program. So the depth is checked before.
"""

from collections.abc import Callable, Iterable

import jax
import numpy as np

from tpudist.array_types import PyTree

# Number of levels. Far more than any model has, and less than JAX can flatten.
MAX_DEPTH = 1000

# Types without children. The classes of JAX's arrays are added when they occur.
_LEAVES: set[type] = {bool, bytes, complex, float, int, str, type(None), np.ndarray}


def check_depth(
    tree: PyTree, name: str, is_leaf: Callable[[PyTree], bool] = lambda _: False
) -> None:
    """Checks that a pytree is not nested too deeply.

    Args:
        tree: The pytree.
        name: Name of the tree, for the message.
        is_leaf: Called with a node; returns whether JAX does not flatten it.

    Raises:
        ValueError: If `tree` has more than `MAX_DEPTH` levels.
    """
    # Breadth first: `level` has the nodes at one depth. A tree that contains itself never runs out
    # of levels and fails at the limit.
    level = [tree]
    for _ in range(MAX_DEPTH + 1):
        # Each node once, because the number of paths to it may be exponential.
        below: dict[int, PyTree] = {}
        for node in level:
            children = () if type(node) in _LEAVES or is_leaf(node) else _children(node)
            if not _LEAVES.issuperset(map(type, children)):  # fast for a node with only leaves
                below.update((id(x), x) for x in children if type(x) not in _LEAVES)
        if not below:
            return
        level = list(below.values())
    raise ValueError(
        f"{name} is nested more than {MAX_DEPTH} levels deep, or contains itself. JAX flattens "
        "pytrees by recursion. Put the arrays into one list or dict, or stack arrays of the same "
        "shape."
    )


def _children(node: PyTree) -> Iterable[PyTree]:
    if isinstance(node, dict):
        return node.values()
    if isinstance(node, list | tuple):
        return node
    if isinstance(node, jax.Array):
        _LEAVES.add(type(node))
        return ()
    flattened = jax.tree_util.default_registry.flatten_one_level(node)
    return () if flattened is None else tuple(flattened[0])
