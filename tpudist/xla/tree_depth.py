"""Pytrees that are nested too deep for JAX, which takes them apart by recursion.

JAX raises a RecursionError or a SystemError, and leaves Python's count of recursions wrong for the
rest of the program. So the depth is looked at before.
"""

from typing import Any

MAX_DEPTH = 1000
"""Levels of a pytree: far above those of any model, and below what JAX can take apart."""


def check_depth(tree: Any, what: str) -> None:
    """Refuses a pytree that is nested too deep.

    Only the first and the last child of each dict, list or tuple are followed, so it costs the same
    for wide trees: deep ones are chains, such as linked lists.

    Args:
        tree: Any pytree.
        what: Name of the tree, for the message.

    Raises:
        ValueError: If `tree` has more than 1000 levels.
    """
    for child in (0, -1):
        node, depth = tree, 0
        while children := _children(node):
            node, depth = children[child], depth + 1
            if depth > MAX_DEPTH:
                raise ValueError(
                    f"{what} is nested more than {MAX_DEPTH} levels deep, or contains itself. JAX "
                    f"takes pytrees apart by recursion. Put the arrays into one list or dict, or "
                    f"stack arrays of the same shape."
                )


def _children(node: Any) -> Any:
    if isinstance(node, list | tuple):
        return node
    return list(node.values()) if isinstance(node, dict) else None
