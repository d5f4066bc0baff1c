"""Finds NaN and infinities in a state, on the devices that have it."""

from collections.abc import Hashable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.lowering import placement


def find_not_finite(arrays: Mapping[str, jax.Array | np.ndarray]) -> list[str]:
    """Returns the names of the arrays that contain NaN or infinities.

    All processes must call it with the same arrays.

    Cost: one program for each set of devices, usually one, which reads every float once. An array
    that several devices have is read by one of them.
    """
    groups: dict[Hashable, dict[str, jax.Array]] = {}
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
    # All programs start before the first result is read, so that the groups' devices work at once.
    with placement.without_mesh():
        pending = [(list(group), _are_finite(list(group.values()))) for group in groups.values()]
    for names, finite in pending:
        bad |= {name for name, fine in zip(names, np.asarray(finite), strict=True) if not fine}
    return [name for name in arrays if name in bad]


def _group_key(sharding: jax.sharding.Sharding) -> Hashable:
    """Returns a key that is equal for arrays that may be arguments of one program."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return sharding.mesh
    return frozenset(sharding.device_set)


@jax.jit
def _are_finite(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(_widen(x)).all() for x in arrays])


def _widen(x: jax.Array) -> jax.Array:
    # XLA has no comparisons of eight-bit floats.
    return x if x.dtype.itemsize > 1 else x.astype(jnp.float32)
