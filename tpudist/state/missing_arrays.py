"""Reports arguments whose arrays were deleted: an earlier call has overwritten them in place."""

from collections.abc import Iterable

import jax
from flax import nnx

from tpudist.array_types import PyTree
from tpudist.state import nnx_contents
from tpudist.values.per_replica import PerReplica
from tpudist.xla import descriptions

# jax 0.10.2 ends the process if a deleted array is donated again; 0.12 raises an error.
CRASHES = jax.__version_info__ < (0, 12)


def require_present(donated: PyTree) -> None:
    """Raises `RuntimeError` for deleted arrays. Newer versions of JAX do that themselves.

    Args:
        donated: Donated inputs of a program. At its first call they may be NumPy arrays.
    """
    for x in jax.tree.leaves(donated) if CRASHES else ():
        if isinstance(x, jax.Array) and x.is_deleted():
            shape = descriptions.describe_array(x)
            raise RuntimeError(f"Array has been deleted with shape={shape}.")


def explain(error: Exception, function: str, arguments: Iterable[tuple[str, object]]) -> None:
    """Raises a `RuntimeError` that names the argument whose array was deleted, if there is one.

    Args:
        error: JAX's error about the deleted array.
        function: Name of the function that received the arguments.
        arguments: The flat arguments, each with its name.
    """
    for name, value in arguments:
        for part, array in _arrays_of(value):
            if isinstance(array, jax.Array) and array.is_deleted():
                raise RuntimeError(
                    f"'{function}' received argument '{name}', but its array{part} "
                    f"{descriptions.describe_array(array)} no longer exists: an earlier call has "
                    "overwritten it in place. A call may overwrite NNX objects that it changes, "
                    "and arguments in RunOptions(donate_argnums=...); nnx.clone shares its arrays "
                    "with the original. To keep old values, copy them before that call, "
                    "copy.deepcopy(model) or jax.tree.map(jnp.copy, arrays), or pass "
                    "RunOptions(donate_state=False) to that call."
                ) from error


def _arrays_of(value: object) -> list[tuple[str, object]]:
    """Returns the arrays of a flat argument, each with its path as text for the message."""
    if isinstance(value, PerReplica):
        return [("", value.array)]
    if isinstance(value, nnx.Variable):
        return [("", x) for x in jax.tree.leaves(value.get_raw_value())]
    if isinstance(value, nnx.State):
        paths = nnx_contents.variables_of_state(value)
        arrays = jax.tree.leaves(value)
        pairs = zip(paths, arrays, strict=True)
        return [(f" '{path.removeprefix('.')}'", x) for (path, _), x in pairs]
    if isinstance(value, nnx_contents.OBJECT_TYPES):
        return [(f" '{'.'.join(path)}'", x) for path, x in nnx_contents.public_contents(value)]
    return [("", value)]
