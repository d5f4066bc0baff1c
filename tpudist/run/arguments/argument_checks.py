"""Raises for arguments of a replica function that cannot work, before it is traced."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tpudist.options import RunOptions, shorten
from tpudist.run.arguments import containers
from tpudist.run.arguments.call_arguments import Kinds
from tpudist.state.nnx_binding import Binding
from tpudist.values.per_replica import LocalPart, PerReplica, is_per_replica


def _is_array(x: object) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def check_leaves(
    leaves: Sequence[Any], kinds: Kinds, binding: Binding | None, num_replicas: int, name: str
) -> None:
    """Raises for PerReplicas of another number of replicas, and for arrays JAX cannot handle.

    Raises:
        TypeError: If a numpy array contains objects, or a container that JAX cannot flatten
            contains an array.
        ValueError: If a PerReplica has the wrong number of parts, or an NNX container has a part of
            a partial batch.
    """
    for i in kinds.arrays:
        x = leaves[i]
        # Objects, strings, bytes, timedeltas and datetimes.
        if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "OSUMm":
            raise TypeError(
                f"'{name}' received a numpy array of {x.dtype}, which no device can hold. "
                "Pass numbers, or a list or tuple of Python values."
            )
    for i in kinds.static:
        if containers.contains(leaves[i], _is_array):
            raise TypeError(
                f"'{name}' received a {type(leaves[i]).__name__} that holds an array. JAX cannot "
                "look into it, so the array would be frozen into the program. Register a dataclass "
                "(@jax.tree_util.register_dataclass), or pass a plain dict, list or tuple."
            )
    nnx_values = [binding.values() if binding is not None else []]
    nnx_values += [leaves[i] for i in kinds.states]
    inner: list[PerReplica] = list(
        filter(is_per_replica, jax.tree.leaves(nnx_values, is_leaf=is_per_replica))
    )
    for x in inner:
        if x.is_padded and not isinstance(x, LocalPart):
            raise ValueError(
                f"'{name}' received an NNX container that holds {x!r}, which is part of a partial "
                "batch. tpudist counts its rows only if it is an argument, or is in a dict, list "
                "or tuple. Take it out of the container, and pass it by itself."
            )
    for x in [*(leaves[i] for i in kinds.per_replica), *inner]:
        parts = num_replicas if isinstance(x, LocalPart) else x.array.shape[0]
        if parts != num_replicas:
            raise ValueError(
                f"'{name}' received {x!r}, but runs on {num_replicas} replica(s): the value was "
                "made under another strategy. Distribute it with the strategy that runs the "
                "function."
            )


def check_options(options: object, function: str) -> None:
    """Raises TypeError if the options of `run` are not `RunOptions`."""
    if not isinstance(options, RunOptions):
        raise TypeError(
            f"run of '{function}' received options={shorten(options)} of type "
            f"{type(options).__name__}. Pass a tpudist.RunOptions, or None."
        )


def check_positions(argnums: Sequence[int], field: str, function: str, num_args: int) -> None:
    """Raises for positions of arguments, a field of `RunOptions`, that a call does not have.

    Raises:
        ValueError: If a position is negative or too large.
    """
    if any(not 0 <= i < num_args for i in argnums):
        raise ValueError(
            f"RunOptions({field}={argnums}): '{function}' received {num_args} positional "
            f"argument(s). Name positions from 0 to {num_args - 1}."
        )
