"""Protocols for the objects of higher layers that `context` uses.

The classes that implement them are `state.variable.Variable`, `values.per_replica.PerReplica`,
`state.storage.Storage`, `run.replica_context.ReplicaContext` and
`reductions.cross_device_ops.CrossDeviceOps`. They do not inherit from the protocols; type checkers
compare the members.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
from jax.sharding import PartitionSpec

from tpudist.array_types import PyTree

if TYPE_CHECKING:
    from tpudist.reduce_op import ReduceOp
    from tpudist.xla.communication_options import CommunicationOptions


class VariableLike(Protocol):
    """A Variable, as the frame of a trace and the strategy use it.

    Attributes:
        _value: The array, `[num_replicas, ...]` if `on_read`.
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

    @property
    def is_on_servers(self) -> bool:
        """Whether its value is on a parameter server."""
        ...


class PerReplicaLike(Protocol):
    """A PerReplica or LocalPart, as the frame of a trace uses it."""

    @property
    def array(self) -> jax.Array:
        """The array: stacked, `[num_replicas, ...]`, or in a trace the part of one replica."""
        ...


class StorageLike(Protocol):
    """The one place that stores all Variables of a strategy; see `state.storage.Storage`."""

    @property
    def device(self) -> jax.Device:
        """The device that stores them, or whose host does."""
        ...

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The device and its kind of memory."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether a fetched value may share memory with the stored one."""
        ...

    def fetch(self, values: list[PyTree]) -> list[PyTree]:
        """Returns stored values on every replica."""
        ...

    def store(self, values: list[jax.Array]) -> list[jax.Array]:
        """Moves arrays that every replica has to the storage."""
        ...

    def place(self, values: PyTree) -> PyTree:
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
        value: PyTree,
        options: "CommunicationOptions | None" = None,
    ) -> PyTree:
        """Combines `value` over all replicas."""
        ...


class CrossDeviceOpsLike(Protocol):
    """The communication of reductions; see `reductions.cross_device_ops.CrossDeviceOps`."""

    def reduce(
        self,
        reduce_op: "ReduceOp | str",
        per_replica_value: object,
        destinations: object,
        options: "CommunicationOptions | None" = None,
    ) -> Any:
        """Combines one value over replicas."""
        ...

    def batch_reduce(
        self,
        reduce_op: "ReduceOp | str",
        value_destination_pairs: Sequence[tuple[object, object]],
        options: "CommunicationOptions | None" = None,
    ) -> list[Any]:
        """Combines several values over replicas."""
        ...
