"""Protocols for the objects of higher layers that `context` uses.

The classes that implement them are `state.variable.Variable`, `state.storage.Storage`,
`run.replica_context.ReplicaContext` and `reductions.cross_device_ops.CrossDeviceOps`. They do not
inherit from the protocols; type checkers compare the members.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    from tpudist.reduce_op import ReduceOp
    from tpudist.xla.communication_options import CommunicationOptions


class VariableLike(Protocol):
    """A Variable, as the frame of a trace and the strategy use it.

    Attributes:
        _value: The array, with a leading dim of replicas if `on_read`.
    """

    _value: Any

    @property
    def name(self) -> str:
        """The name, for messages."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its value, or of each component."""
        ...

    @property
    def dtype(self) -> Any:
        """The dtype of its value."""
        ...

    @property
    def on_read(self) -> bool:
        """Whether each replica has a component."""
        ...

    @property
    def spec(self) -> PartitionSpec | None:
        """The axes inside a replica that split the value; None if the strategy decides."""
        ...


class StorageLike(Protocol):
    """The one place that holds all Variables of a strategy; see `state.storage.Storage`."""

    @property
    def device(self) -> jax.Device:
        """The device, or the device whose host it is."""
        ...

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The device, and which of its memories."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether a fetched value may share memory with the stored one."""
        ...

    def fetch(self, values: list[Any]) -> list[Any]:
        """Returns stored values on every replica."""
        ...

    def store(self, values: list[Any]) -> list[Any]:
        """Moves arrays that every replica holds to the storage."""
        ...

    def place(self, values: Any) -> Any:
        """Moves a pytree of arrays from anywhere to the storage."""
        ...

    def take_in(self, binding: Any) -> None:
        """Moves the arrays of NNX objects to the storage."""
        ...


class ReplicaContextLike(Protocol):
    """The view of one replica; see `run.replica_context.ReplicaContext`."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that run the function together."""
        ...

    def all_reduce(
        self,
        reduce_op: "ReduceOp | str",
        value: Any,
        options: "CommunicationOptions | None" = None,
    ) -> Any:
        """Combines `value` over all replicas."""
        ...


class CrossDeviceOpsLike(Protocol):
    """The communication of reductions; see `reductions.cross_device_ops.CrossDeviceOps`."""

    def reduce(
        self,
        reduce_op: "ReduceOp | str",
        per_replica_value: Any,
        destinations: Any,
        options: "CommunicationOptions | None" = None,
    ) -> Any:
        """Combines one value over replicas."""
        ...

    def batch_reduce(
        self,
        reduce_op: "ReduceOp | str",
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: "CommunicationOptions | None" = None,
    ) -> list[Any]:
        """Combines several values over replicas."""
        ...
