"""Arrays that Flax has laid out for `jax.pmap`: with a leading dim that counts devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from tpudist.xla import descriptions
from tpudist.xla.traces import is_traced

# Flax's name for the axis of devices, in `jax_utils.replicate` and `prefetch_to_device`.
_AXIS = "_device_put_sharded"


def refuse_replicated(
    leaves: Sequence[Any], labels: Callable[[], Sequence[str]], name: str
) -> None:
    """Raises for arrays that `flax.jax_utils` has laid out for `pmap`.

    Raises:
        ValueError: If a leading dim has one part for each device.
    """
    for i, leaf in enumerate(leaves):
        array = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
        is_concrete = isinstance(array, jax.Array) and not is_traced(array)
        if is_concrete and _has_device_dim(array):
            raise ValueError(
                f"'{name}' received '{labels()[i]}' {descriptions.describe_array(array)}. Its dim "
                f"0 counts {array.shape[0]} devices: flax.jax_utils made it for jax.pmap, and each "
                "replica would compute with all of it. Pass the state without jax_utils.replicate "
                "(jax_utils.unreplicate(state) removes the dim), and a batch as "
                "strategy.distribute_batch(batch, has_device_dim=True)."
            )


def _has_device_dim(array: jax.Array) -> bool:
    sharding = array.sharding
    return (
        isinstance(sharding, NamedSharding)
        and sharding.mesh.axis_names == (_AXIS,)
        and sharding.spec[:1] == (_AXIS,)
        and array.shape[0] == sharding.mesh.size
    )
