"""Describes the call of a replica function in words, to explain why it was compiled once more."""

import inspect
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from tpudist.options import RunOptions
from tpudist.run.arguments.flattener import is_leaf
from tpudist.state import missing_arrays, nnx_contents, value_keys
from tpudist.values.per_replica import PerReplica
from tpudist.xla import descriptions
from tpudist.xla.array_attributes import has_dtype, has_shape


def describe_call(
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    leaves: Sequence[Any],
    options: RunOptions,
    numbers: Collection[int] = (),
) -> dict[str, str]:
    """Returns by name the dtype and shape of each array of a call, and other values as text.

    An NNX object has an entry for each of its Variables, and for what determines how it computes.

    Args:
        numbers: Positions of the `leaves` that are fed Python numbers, whose value does not matter.
    """
    descriptions: dict[str, str] = {}
    for i, name in enumerate(names_of_leaves(fn, args, kwargs)):
        leaf = leaves[i]
        if i in numbers:
            descriptions[name] = f"a Python {type(leaf).__name__}"
        elif isinstance(leaf, nnx_contents.OBJECT_TYPES):
            for path, value in nnx_contents.public_contents(leaf):
                descriptions[".".join([name, *path])] = _describe(value)
        else:
            descriptions[name] = _describe(leaf)
    descriptions["options"] = repr(options)
    return descriptions


def names_of_leaves(
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    is_leaf: Callable[[Any], bool] | None = is_leaf,
) -> list[str]:
    """Returns the name of each flat argument: the function's parameter, and the path inside it."""
    parameters = _names_of_positional(fn, len(args))
    names = []
    for path, _ in jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_leaf)[0]:
        # `args` or `kwargs`; the position or the keyword there; and the path inside the argument.
        _, key, *rest = path
        name = key.key if isinstance(key, jax.tree_util.DictKey) else parameters[key.idx]
        names.append(f"{name}{jax.tree_util.keystr(tuple(rest))}")
    return names


def _names_of_positional(fn: Callable[..., Any], num_args: int) -> list[str]:
    """Returns the names of the first positional arguments: `x`, or `args[0]` for a star."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for parameter in parameters[:num_args]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            return names + [f"{parameter.name}[{i}]" for i in range(num_args - len(names))]
        names.append(parameter.name)
    return names + [f"args[{i}]" for i in range(len(names), num_args)]


def explain_overwritten(
    error: Exception, fn: Callable[..., Any], args: tuple, kwargs: dict
) -> None:
    """Raises an error that names the argument whose array was deleted, if `error` is about one."""
    if "deleted" in str(error):
        names = names_of_leaves(fn, args, kwargs)
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_leaf)
        missing_arrays.explain(error, descriptions.name_of(fn), zip(names, leaves, strict=True))


def _describe(value: Any) -> str:
    if isinstance(value, PerReplica):
        partial = " of a partial batch" if value.is_padded else ""
        return f"{descriptions.describe_array(value)} per replica{partial}"
    # An array of JAX, NumPy, or another library.
    if has_shape(value) and has_dtype(value):
        return descriptions.describe_array(value)
    if isinstance(value, str | int | float | complex | None):
        return f"the value {value!r}"
    return textwrap.shorten(f"a {value_keys.describe(value)}", 200)
