"""Arrays that a program has laid out for `jax.pmap`: with a leading dim of one per device."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from tpudist.values.per_replica import is_distributed
from tpudist.xla import compile_log

# What Flax calls the axis of the devices, in `jax_utils.replicate` and `prefetch_to_device`.
_AXIS = "_device_put_sharded"


def refuse_replicated(
    leaves: Sequence[Any], labels: Callable[[], Sequence[str]], name: str
) -> None:
    """Refuses what `flax.jax_utils` has laid out for `pmap`, where a function takes it as it is.

    Args:
        leaves: All flat arguments.
        labels: Gives their names.
        name: Of the function.

    Raises:
        ValueError: A leading dim has one part for each device.
    """
    for i, leaf in enumerate(leaves):
        for array in () if is_distributed(leaf) else jax.tree.leaves(leaf):
            if isinstance(array, jax.Array) and _has_device_dim(array):
                raise ValueError(
                    f"'{name}' was given '{labels()[i]}' {compile_log.describe(array)}, whose dim "
                    f"0 is one of {array.shape[0]} devices: flax.jax_utils made it for jax.pmap. "
                    f"Under a strategy, each replica would compute with all of it. Pass the state "
                    f"without jax_utils.replicate (jax_utils.unreplicate(state) takes the dim "
                    f"away), and a batch as strategy.distribute_batch(batch, has_device_dim=True)."
                )


def _has_device_dim(array: jax.Array) -> bool:
    sharding = array.sharding
    return (
        isinstance(sharding, NamedSharding)
        and sharding.mesh.axis_names == (_AXIS,)
        and sharding.spec[:1] == (_AXIS,)
        and array.shape[0] == sharding.mesh.size
    )
