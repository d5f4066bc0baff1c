"""Where the result of a reduction is wanted: on all devices of a strategy, or on one."""

from typing import Any

import jax

from tpudist.array_types import PyTree
from tpudist.options import shorten
from tpudist.values.component import Component
from tpudist.values.indexed_slices import IndexedSlices
from tpudist.values.per_replica import DistributedValues
from tpudist.xla.devices import as_devices
from tpudist.xla.traces import is_traced


def device_of(destinations: Any, what: str) -> jax.Device | None:
    """The one device that a result of `what` is wanted on; None for all devices of the strategy.

    Args:
        destinations: A device or its name; or a value that is where the result is wanted: a
            Variable, a PerReplica, an array.
        what: The method that was given it.

    Raises:
        ValueError: `destinations` is something else, or names a device that is not there.
    """
    if isinstance(destinations, str | jax.Device):
        return as_devices([destinations], local=True)[0]
    if isinstance(destinations, Component):
        several = destinations.distribute_strategy.replica_mesh.devices_per_replica > 1
        return None if several else destinations.device
    is_value = isinstance(destinations, DistributedValues | IndexedSlices)
    if is_value or hasattr(destinations, "__jax_array__") or hasattr(destinations, "__array__"):
        return None
    raise ValueError(
        f"{what} received destinations={shorten(destinations)} of type "
        f"{type(destinations).__name__}. Destinations must be one value (a Variable, a PerReplica "
        "or an array) at the place of the result, or one device (such as 'cpu:0')."
    )


def move_to_device(result: PyTree, device: jax.Device | None) -> PyTree:
    """`result` on one device; where it is, without a device or in a program that is traced."""
    if device is None or any(map(is_traced, jax.tree.leaves(result))):
        return result
    return jax.device_put(result, device)
