"""Lists the contents of NNX objects, by the names of their attributes."""

import gc
from collections.abc import Sequence
from typing import TypeAlias

import jax
from flax import nnx

from tpudist.array_types import PyTree

Object: TypeAlias = nnx.Pytree | nnx.Variable
OBJECT_TYPES = (nnx.Pytree, nnx.Variable)


def nodes_of(objects: Sequence[PyTree]) -> list[Object]:
    """Returns all objects and Variables in `objects`, in the same order for a copy of them."""
    return [x for _, x in nnx.iter_graph(tuple(objects)) if isinstance(x, OBJECT_TYPES)]


def public_contents(value: Object) -> list[tuple[tuple[str, ...], PyTree]]:
    """Returns the arrays and public plain attributes in an object, each with its path."""
    if isinstance(value, nnx.Variable):
        return [((), value.get_raw_value())]
    values = []
    for path, x in nnx.iter_graph(value):
        x = x.get_raw_value() if isinstance(x, nnx.Variable) else x
        is_private = any(str(part).startswith("_") for part in path)
        if not is_private and isinstance(x, jax.Array | bool | int | float | str):
            values.append((tuple(map(str, path)), x))
    return values


def holders_of(array: jax.Array) -> list[nnx.Variable]:
    """Returns the NNX Variables whose value is this array object.

    Searches all objects of the process, so use it only for an error message.
    """
    # The garbage collector does not search objects that the program has frozen.
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    try:
        return [x for x in gc.get_referrers(array) if isinstance(x, nnx.Variable)]
    finally:
        if is_frozen:
            gc.freeze()


def role_of(variable: nnx.Variable | None) -> str:
    """Returns the role of a Variable: "parameters", "optimizer state", "cache" or "other"."""
    if isinstance(variable, nnx.OptState):
        return "optimizer state"
    if isinstance(variable, nnx.Cache):
        return "cache"
    return "parameters" if isinstance(variable, nnx.Param) else "other"


def variables_of_state(state: nnx.State) -> list[tuple[str, nnx.Variable | None]]:
    """Returns the path of each array of an `nnx.State`, and the Variable that contains it.

    A path is a text that can follow the name of the state, such as `.layer.kernel`.
    """
    holders = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )[0]
    variables = []
    for path, x in holders:
        variable = x if isinstance(x, nnx.Variable) else None
        name = f".{jax.tree_util.keystr(path, simple=True, separator='.')}" if path else ""
        variables += [(name, variable)] * len(jax.tree.leaves(x))
    return variables


def share_variables(before: PyTree, after: PyTree) -> PyTree:
    """Returns `after`, whose variables of Flax are one object where those of `before` are.

    Flax passes a variable once that several arguments contain, such as a model and an
    `nnx.ModelAndOptimizer` of it. A tree that was flattened has a copy in each.
    """

    def is_variable(x: object) -> bool:
        return isinstance(x, nnx.Variable)

    own, treedef = jax.tree.flatten(after, is_leaf=is_variable)
    first = {}
    for i, x in enumerate(jax.tree.leaves(before, is_leaf=is_variable)):
        if is_variable(x):
            own[i] = first.setdefault(id(x), own[i])
    return treedef.unflatten(own)
