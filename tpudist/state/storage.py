"""Where state lives between steps, if that is not the strategy's mesh itself."""

import abc
from typing import Any

import jax

from tpudist.state import nnx_binding


class Storage(abc.ABC):
    """One place that holds all Variables of a strategy; its hook `storage`.

    A step fetches what it reads and stores what it has changed.

    Attributes:
        device: The device, or that whose host it is.
        sharding: The device, and which of its memories.
        shares_memory: Whether a fetched value may share memory with the stored one, so that it must
            not be overwritten.
    """

    device: jax.Device
    sharding: jax.sharding.Sharding
    shares_memory: bool

    @abc.abstractmethod
    def fetch(self, values: list[Any]) -> list[Any]:
        """Stored values, each a pytree of arrays, whole on every replica."""

    @abc.abstractmethod
    def store(self, values: list[Any]) -> list[Any]:
        """Arrays that every replica holds, in the storage alone."""

    @abc.abstractmethod
    def place(self, values: Any) -> Any:
        """A pytree of arrays from anywhere, in the storage alone."""

    @abc.abstractmethod
    def take_in(self, binding: nnx_binding.Binding | None) -> None:
        """Moves what NNX objects hold to the storage, if they were made elsewhere."""
