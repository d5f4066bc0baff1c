"""NumPy arrays among the inputs of a step: whole numbers that fit, and copies of small ones."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.lowering import placement
from tpudist.run.arguments import call_arguments, call_description
from tpudist.xla import integers
from tpudist.xla.mesh import ReplicaMesh

# An array of so many bytes is copied in a few microseconds.
_MAX_COPIED_BYTES = 1 << 16


def are_among(arrays: Sequence[Any]) -> bool:
    """Whether any is NumPy's; asks each type once, as there may be hundreds of arrays."""
    return any([issubclass(kind, integers.HOST_TYPES) for kind in {*map(type, arrays)}])


def take(arrays: Sequence[Any], now: call_arguments.Call, function: str) -> list[Any]:
    """The inputs, without integers of NumPy's that JAX would cut; small arrays are copied.

    The program may read them when the call has returned, and the caller changed them.

    Args:
        arrays: The flat inputs.
        now: The call.
        function: What the function is called.

    Raises:
        ValueError: An integer does not fit.
    """
    taken = list(arrays)
    for i, x in enumerate(arrays):
        if isinstance(x, integers.HOST_TYPES):
            integers.check_fit(x, lambda x=x: _name_of(x, now, function))
            if isinstance(x, np.ndarray) and x.nbytes <= _MAX_COPIED_BYTES:
                taken[i] = x.copy()
    return taken


def place_numbers(
    arrays: list[Any], positions: Iterable[int], mesh: ReplicaMesh, *, abstract: bool
) -> None:
    """Makes arrays on the mesh of Python numbers in state, in place.

    They are as the arrays that the step gives back for them: it is the same program then.

    Args:
        arrays: The flat inputs.
        positions: Which of them may be such numbers.
        mesh: Where to.
        abstract: Whether to give their shapes: the devices may be described only.
    """
    for i in positions:
        if call_arguments.is_number(arrays[i]):
            if abstract:
                made = jax.eval_shape(lambda x=arrays[i]: jnp.asarray(x))
                arrays[i] = jax.ShapeDtypeStruct(
                    (), made.dtype, weak_type=made.weak_type, sharding=mesh.replicated
                )
            else:
                arrays[i] = jax.device_put(jnp.asarray(arrays[i]), mesh.replicated)


def place_state(
    arrays: list[Any],
    positions: Iterable[int],
    mesh: ReplicaMesh,
    now: call_arguments.Call,
    function: str,
) -> None:
    """Makes arrays on the mesh of NumPy's that are state which the step gives back, in place.

    They are as those that it gives back then, which the next call is made with: one program. They
    share no memory with the caller's. What is lowered for without data is placed alike.

    Args:
        arrays: The flat inputs.
        positions: Which of them are such state.
        mesh: Where to.
        now: The call.
        function: What the function is called.

    Raises:
        ValueError: An integer does not fit.
    """
    for i in positions:
        x = arrays[i]
        if isinstance(x, integers.HOST_TYPES):
            integers.check_fit(x, lambda x=x: _name_of(x, now, function))
            arrays[i] = placement.replicate(mesh, x.copy())
        elif type(x) is jax.ShapeDtypeStruct and x.sharding is None:
            arrays[i] = x.update(sharding=mesh.replicated)


def _name_of(argument: Any, now: call_arguments.Call, function: str) -> str:
    names = call_description.names_of_leaves(now.fn, now.args, now.kwargs)
    found = [name for name, x in zip(names, now.leaves(), strict=True) if x is argument]
    # An array of an nnx.State is no argument by itself.
    return f"Argument '{found[0]}' of '{function}'" if found else f"An argument of '{function}'"
