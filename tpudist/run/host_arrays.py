"""NumPy arrays among the inputs of a step: whole numbers that fit, and copies of small ones."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.run import call_arguments, call_description
from tpudist.xla import integers, placement
from tpudist.xla.mesh import ReplicaMesh

# An array of so many bytes is copied in a few microseconds.
_MAX_COPIED_BYTES = 1 << 16


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
        if type(x) in integers.HOST_TYPES:
            integers.check_fit(x, lambda x=x: _name_of(x, now, function))
            if type(x) is np.ndarray and x.nbytes <= _MAX_COPIED_BYTES:
                taken[i] = x.copy()
    return taken


def place_numbers(arrays: list[Any], positions: Sequence[int], mesh: ReplicaMesh) -> None:
    """Makes arrays on the mesh of Python numbers in state, in place.

    They are as the arrays that the step gives back for them: it is the same program then.
    """
    for i in positions:
        if call_arguments.is_number(arrays[i]):
            arrays[i] = jax.device_put(jnp.asarray(arrays[i]), mesh.replicated)


def place_state(arrays: list[Any], positions: Iterable[int], mesh: ReplicaMesh) -> None:
    """Makes arrays on the mesh of NumPy's that are state which the step gives back, in place.

    They are as those that it gives back then, which the next call is made with: one program. They
    share no memory with the caller's. Long integers are left to `take`, which looks at them.
    """
    for i in positions:
        x = arrays[i]
        if type(x) is np.ndarray and (x.dtype.kind in "fcb" or x.itemsize <= 4):
            arrays[i] = placement.replicate(mesh, x.copy())


def _name_of(argument: Any, now: call_arguments.Call, function: str) -> str:
    names = call_description.names_of_leaves(now.fn, now.args, now.kwargs)
    found = [name for name, x in zip(names, now.leaves(), strict=True) if x is argument]
    return f"Argument '{(found or ['?'])[0]}' of '{function}'"
