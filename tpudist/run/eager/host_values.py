"""Arrays in the host's memory, through which the threads of eager replicas exchange values.

A host value is a NumPy array, or `HostKeys` for random keys, which NumPy has no dtype for.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tpudist.xla import internals


class HostKeys:
    """Random keys in the host's memory.

    Args:
        data: The data of the keys; see `jax.random.key_data`.
        impl: The algorithm; see `jax.random.key_impl`.
    """

    def __init__(self, data: np.ndarray, impl: Any):
        self.data, self.impl = data, impl

    def __getitem__(self, index: int) -> "HostKeys":
        return HostKeys(self.data[index], self.impl)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of keys."""
        return self.data.shape[:-1]


HostValue: TypeAlias = np.ndarray | HostKeys


def fetch(array: ArrayLike) -> HostValue:
    """Returns an array as a host value."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return HostKeys(np.asarray(jax.random.key_data(array)), jax.random.key_impl(array))
    return np.asarray(array)


def to_array(value: HostValue | ArrayLike) -> jax.Array:
    """Returns a host value as an array that shares no memory with it."""
    if isinstance(value, HostKeys):
        return jax.random.wrap_key_data(jnp.array(value.data), impl=value.impl)
    with internals.place_explicitly():
        return jnp.array(value)


def stack_values(values: Sequence[Any]) -> Any:
    """Returns host values of one shape as one, with a leading dim."""
    if isinstance(values[0], HostKeys):
        return HostKeys(np.stack([x.data for x in values]), values[0].impl)
    return np.stack(values)


def are_equal(values: Sequence[HostValue]) -> bool:
    """Whether host values are equal to the last bit, with equal shapes and dtypes."""
    numbers = [x.data if isinstance(x, HostKeys) else np.asarray(x) for x in values]
    first = numbers[0]
    return all(
        x.shape == first.shape and x.dtype == first.dtype and x.tobytes() == first.tobytes()
        for x in numbers[1:]
    )
