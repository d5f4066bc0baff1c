"""Arguments whose arrays are gone, because an earlier call has overwritten them in place."""

from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx

from tpudist.state import nnx_contents
from tpudist.values.per_replica import PerReplica
from tpudist.xla import compile_log

_CRASHES = jax.__version_info__ < (0, 12)
"""Whether JAX ends the process if a donated array was donated before; 0.10.2 does."""


def require_present(donated: Any) -> None:
    """Raises the error that newer versions of JAX raise for arrays that are gone.

    Args:
        donated: The donated inputs of a program, a pytree. They may be NumPy's at its first call.

    Raises:
        RuntimeError: If an array is gone.
    """
    for x in jax.tree.leaves(donated) if _CRASHES else ():
        if isinstance(x, jax.Array) and x.is_deleted():
            raise RuntimeError(f"Array has been deleted with shape={compile_log.describe(x)}.")


def explain(error: Exception, user: str, arguments: Iterable[tuple[str, Any]]) -> None:
    """Raises an error that names the argument whose array is gone, if there is one.

    Args:
        error: The error of JAX that is due to it.
        user: The name of the function that got the arguments.
        arguments: The flat arguments, each with its name.

    Raises:
        RuntimeError: If an array of an argument is gone.
    """
    for name, value in arguments:
        for part, array in _arrays_of(value):
            if isinstance(array, jax.Array) and array.is_deleted():
                raise RuntimeError(
                    f"'{user}' received argument '{name}', but its array{part} "
                    f"{compile_log.describe(array)} no longer exists: an earlier call has "
                    "overwritten it in place. A call may overwrite NNX objects that it changes, "
                    "and arguments in RunOptions(donate_argnums=...); nnx.clone shares its arrays "
                    "with the original. To keep old values, copy them before that call, "
                    "copy.deepcopy(model) or jax.tree.map(jnp.copy, arrays), or pass "
                    "RunOptions(donate_state=False) to that call."
                ) from error


def _arrays_of(value: Any) -> list[tuple[str, Any]]:
    """The arrays of a flat argument, each with a text for where it is."""
    if isinstance(value, PerReplica):
        return [("", value.array)]
    if isinstance(value, nnx.Variable):
        return [("", x) for x in jax.tree.leaves(value.get_raw_value())]
    if isinstance(value, nnx.State):
        paths = nnx_contents.variables_of_state(value)
        arrays = jax.tree.leaves(value)
        return [(f" '{p[1:]}'", x) for (p, _), x in zip(paths, arrays, strict=True)]
    if isinstance(value, nnx_contents.OBJECT_TYPES):
        held = nnx_contents.contents(value)
        return [(f" '{'.'.join(path)}'", x) for path, x in held]
    return [("", value)]
