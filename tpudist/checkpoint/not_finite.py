"""Looks for NaN and infinities in a state, on the devices that hold it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.lowering import placement


def find_not_finite(arrays: Mapping[str, Any]) -> list[str]:
    """The names of the arrays that hold a NaN or an infinity.

    Cost: one program for each set of devices, as a rule one, which reads every float once; of what
    several devices hold alike, one of them reads. Several processes must ask for the same arrays.
    """
    groups: dict[Any, dict[str, Any]] = {}
    bad: set[str] = set()
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.inexact) or x.size == 0:
            continue
        if isinstance(x, np.ndarray | np.generic):
            if not np.isfinite(np.asarray(x)).all():
                bad.add(name)
            continue
        x = x.addressable_data(0) if x.is_fully_replicated else x
        groups.setdefault(_group_key(x.sharding), {})[name] = x
    # All are dispatched before any is waited for: the groups' devices work side by side.
    with placement.without_mesh():
        pending = [(list(group), _are_finite(list(group.values()))) for group in groups.values()]
    for names, finite in pending:
        bad |= {name for name, fine in zip(names, np.asarray(finite), strict=True) if not fine}
    return [name for name in arrays if name in bad]


def _group_key(sharding: jax.sharding.Sharding) -> Any:
    """What the shardings of arrays must agree on to be arguments of one program."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return sharding.mesh
    return frozenset(sharding.device_set)


@jax.jit
def _are_finite(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(_widen(x)).all() for x in arrays])


def _widen(x: jax.Array) -> jax.Array:
    """Eight-bit floats have no comparisons of their own."""
    return x if x.dtype.itemsize > 1 else x.astype(jnp.float32)
