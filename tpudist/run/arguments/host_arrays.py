"""NumPy arrays and Python numbers among the inputs of a step: checked, copied, or moved.

`jit` accepts them as they are. But it truncates integers silently, reads arrays after the call has
returned, and compiles again when state comes back from the step as arrays on the mesh.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.lowering import placement
from tpudist.run.arguments import call_arguments, call_description
from tpudist.run.arguments.call_arguments import RunCall
from tpudist.xla import integers
from tpudist.xla.mesh import ReplicaMesh

# A program may read a NumPy array after the call has returned. Up to 64 KiB it is copied, which
# takes a few microseconds. A larger one must not change before the results exist: see
# `Strategy.run`.
_MAX_COPIED_BYTES = 64 * 1024


def are_among(arrays: Sequence[Any]) -> bool:
    """Whether any array is NumPy's; checks each type once, as there may be hundreds of arrays."""
    return any([issubclass(kind, integers.HOST_TYPES) for kind in {*map(type, arrays)}])


def copy_small_arrays(arrays: Sequence[Any], call: RunCall, function: str) -> list[Any]:
    """Returns the inputs with copies of small NumPy arrays, which the caller may change.

    Raises:
        ValueError: If JAX would truncate an integer.
    """
    copied = list(arrays)
    for i, x in enumerate(arrays):
        if isinstance(x, integers.HOST_TYPES):
            integers.check_fit(x, lambda x=x: _name_of(x, call, function))
            if isinstance(x, np.ndarray) and x.nbytes <= _MAX_COPIED_BYTES:
                copied[i] = x.copy()
    return copied


def place_numbers(
    arrays: list[Any], positions: Iterable[int], mesh: ReplicaMesh, *, abstract: bool
) -> None:
    """Replaces Python numbers in state by arrays on the mesh, in place.

    The step returns arrays of the same kind in their place, so the next call runs the same program.

    Args:
        positions: Positions of inputs that may be such numbers.
        abstract: Whether to use shapes instead of arrays, because the devices may not exist here.
    """
    for i in positions:
        if call_arguments.is_number(arrays[i]):
            if abstract:
                shape = jax.eval_shape(lambda x=arrays[i]: jnp.asarray(x))
                arrays[i] = jax.ShapeDtypeStruct(
                    (), shape.dtype, weak_type=shape.weak_type, sharding=mesh.replicated
                )
            else:
                arrays[i] = jax.device_put(jnp.asarray(arrays[i]), mesh.replicated)


def place_state(
    arrays: list[Any],
    positions: Iterable[int],
    mesh: ReplicaMesh,
    call: RunCall,
    function: str,
) -> None:
    """Replaces NumPy arrays that the step returns as new state by arrays on the mesh, in place.

    The next call gets the arrays that the step returns. These have the same sharding, so both calls
    run one program. They share no memory with the caller's arrays. Shapes without a sharding get
    the same one.

    Raises:
        ValueError: If JAX would truncate an integer.
    """
    for i in positions:
        x = arrays[i]
        if isinstance(x, integers.HOST_TYPES):
            integers.check_fit(x, lambda x=x: _name_of(x, call, function))
            arrays[i] = placement.replicate(mesh, x.copy())
        elif type(x) is jax.ShapeDtypeStruct and x.sharding is None:
            arrays[i] = x.update(sharding=mesh.replicated)


def _name_of(argument: object, call: RunCall, function: str) -> str:
    names = call_description.names_of_leaves(call.fn, call.args, call.kwargs)
    found = [name for name, x in zip(names, call.leaves(), strict=True) if x is argument]
    # An array of an nnx.State is not an argument by itself.
    return f"Argument '{found[0]}' of '{function}'" if found else f"An argument of '{function}'"
