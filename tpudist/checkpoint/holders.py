"""Protocols of the objects that a checkpoint saves: holders of an array, of objects, of a position.

Lower packages, Keras' adapter and users define classes that follow them.
"""

from typing import Any, Protocol, TypeGuard

import jax
import numpy as np
from jax.typing import DTypeLike

from tpudist.array_types import Shape


class ArrayHolder(Protocol):
    """An object with one array, such as a Variable.

    It may also have a method `finish_restore()`, called when all objects are restored, and a
    property `checkpoint_identity`: holders of the same object are saved once.
    """

    def checkpoint_spec(self) -> tuple[Shape, DTypeLike, jax.sharding.Sharding | None]:
        """Returns shape, dtype and sharding (None for an array of the host)."""
        ...

    def checkpoint_value(self) -> Any:
        """Returns the array."""
        ...

    def restore(self, value: jax.Array | np.ndarray) -> None:
        """Stores a restored array, which nobody else uses."""
        ...


class ObjectHolder(Protocol):
    """An object that contains other objects by name."""

    def checkpoint_objects(self) -> dict[str, Any]:
        """Returns the objects, by name."""
        ...


class StateHolder(Protocol):
    """An object with a position that JSON can store, such as an iterator."""

    def get_state(self) -> Any:
        """Returns the position."""
        ...

    def set_state(self, state: Any, /) -> None:
        """Continues from a position."""
        ...


class Container:
    """A base class for objects that contain others by name, such as `Checkpoint`."""

    def checkpoint_objects(self) -> dict[str, Any]:
        """Returns the objects, by name."""
        raise TypeError(f"{type(self).__name__} must define checkpoint_objects().")

    def replace_object(self, name: str, x: object) -> None:
        """Stores a restored object under a name."""
        setattr(self, name, x)


# These look at the type. Attributes of an object may be created on access: `nnx.Rngs` has a stream
# for any name. `hasattr`, because lower packages and users define the classes, and because
# `isinstance` of a runtime protocol is too slow for each leaf of each commit in memory.


def has_state(x: object) -> TypeGuard[StateHolder]:
    """Whether `x` has a position that can be read and set, such as an iterator."""
    return hasattr(type(x), "get_state") and hasattr(type(x), "set_state")


def has_shared_state(x: object) -> bool:
    """Whether all processes have the same state of `x`; its class then has `state_is_shared`."""
    return hasattr(type(x), "state_is_shared")


def has_array(x: object) -> TypeGuard[ArrayHolder]:
    """Whether `x` is an `ArrayHolder`."""
    return hasattr(type(x), "checkpoint_spec")


def has_objects(x: object) -> TypeGuard[ObjectHolder]:
    """Whether `x` contains other objects: a `Container`, or a table on servers."""
    return hasattr(type(x), "checkpoint_objects")
