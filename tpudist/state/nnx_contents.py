"""What NNX objects hold, by the names that their users gave."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

OBJECT_TYPES = (nnx.Pytree, nnx.Variable)


def nodes_of(objects: Sequence[Any]) -> list[Any]:
    """The objects, and the objects and Variables in them, in an order that copies share."""
    return [x for _, x in nnx.iter_graph(tuple(objects)) if isinstance(x, OBJECT_TYPES)]


def contents(value: Any) -> list[tuple[tuple[str, ...], Any]]:
    """What is in an object, with its path: arrays, and the plain attributes that are part of it."""
    if isinstance(value, nnx.Variable):
        return [((), value.get_raw_value())]
    found = []
    for path, x in nnx.iter_graph(value):
        x = x.get_raw_value() if isinstance(x, nnx.Variable) else x
        private = any(str(part).startswith("_") for part in path)
        if not private and isinstance(x, jax.Array | bool | int | float | str):
            found.append((tuple(map(str, path)), x))
    return found


def holders_of(array: jax.Array) -> list[nnx.Variable]:
    """The NNX Variables that hold this very array (to say whose constant it is). Slow."""
    import gc

    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:  # the collector would not look at what the program has frozen
        gc.unfreeze()
    try:
        return [x for x in gc.get_referrers(array) if isinstance(x, nnx.Variable)]
    finally:
        if is_frozen:
            gc.freeze()


def role_of(variable: nnx.Variable | None) -> str:
    """What a Variable is for: "parameters", "optimizer state" or "other"."""
    if isinstance(variable, nnx.OptState):
        return "optimizer state"
    return "parameters" if isinstance(variable, nnx.Param) else "other"


def variables_of_state(state: nnx.State) -> list[tuple[str, nnx.Variable | None]]:
    """For each array of an `nnx.State`: its path, and the Variable that holds it."""
    holders = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )[0]
    found = []
    for path, x in holders:
        variable = x if isinstance(x, nnx.Variable) else None
        name = "".join(f".{getattr(key, 'key', getattr(key, 'name', key))}" for key in path)
        found += [(name, variable)] * len(jax.tree.leaves(x))
    return found
