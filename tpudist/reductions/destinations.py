"""Parses the `destinations` of a reduction: all devices of a strategy, or one device."""

import jax

from tpudist.array_types import PyTree
from tpudist.options import shorten
from tpudist.values.component import Component
from tpudist.values.indexed_slices import IndexedSlices
from tpudist.values.per_replica import DistributedValues
from tpudist.xla.devices import as_devices
from tpudist.xla.traces import is_traced


def device_of(destinations: object, caller: str) -> jax.Device | None:
    """Returns the one device for the result; None for all devices of the strategy.

    Args:
        destinations: A device or its name; or a value on the devices where the result should be: a
            Variable, a PerReplica or an array.
        caller: Name of the method that received `destinations`, for messages.

    Raises:
        ValueError: If `destinations` is something else, or names a missing device.
    """
    if isinstance(destinations, str | jax.Device):
        return as_devices([destinations], local=True)[0]
    if isinstance(destinations, Component):
        several = destinations.distribute_strategy.replica_mesh.devices_per_replica > 1
        return None if several else destinations.device
    is_value = isinstance(destinations, DistributedValues | IndexedSlices)
    # Arrays of NumPy, JAX and other libraries, by the protocols through which they convert.
    if is_value or hasattr(destinations, "__jax_array__") or hasattr(destinations, "__array__"):
        return None
    raise ValueError(
        f"{caller} received destinations={shorten(destinations)} of type "
        f"{type(destinations).__name__}. Destinations must be one value (a Variable, a PerReplica "
        "or an array) at the place of the result, or one device (such as 'cpu:0')."
    )


def move_to_device(result: PyTree, device: jax.Device | None) -> PyTree:
    """Moves `result` to `device`. Returns it unchanged without a device, or in a trace."""
    if device is None or any(map(is_traced, jax.tree.leaves(result))):
        return result
    return jax.device_put(result, device)
