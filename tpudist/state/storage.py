"""Interface of a place outside the mesh that stores a strategy's state between steps."""

import abc
from typing import Any

import jax

from tpudist.array_types import PyTree
from tpudist.state import nnx_binding


class Storage(abc.ABC):
    """One place that stores all Variables of a strategy; see the hook `Strategy.storage`.

    A step fetches the values that it reads, and stores the values that it has changed.

    Attributes:
        device: The device, or the device whose host it is.
        sharding: The device, and which of its memories.
        shares_memory: Whether a fetched value may share memory with the stored value. If so, steps
            must not overwrite it in place.
    """

    device: jax.Device
    sharding: jax.sharding.Sharding
    shares_memory: bool

    @abc.abstractmethod
    def fetch(self, values: list[Any]) -> list[Any]:
        """Returns stored values (pytrees of arrays), replicated on every replica."""

    @abc.abstractmethod
    def store(self, values: list[Any]) -> list[Any]:
        """Moves arrays that every replica holds to the storage."""

    @abc.abstractmethod
    def place(self, values: PyTree) -> PyTree:
        """Moves a pytree of arrays from anywhere to the storage."""

    @abc.abstractmethod
    def take_in(self, binding: nnx_binding.Binding | None) -> None:
        """Moves the arrays of NNX objects to the storage, if they were made elsewhere."""
