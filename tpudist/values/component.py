"""The part of a variable that one replica holds."""

from typing import Any, Protocol

import jax

from tpudist import context
from tpudist.context.strategy_base import StrategyBase
from tpudist.lowering import placement
from tpudist.options import warn_of_op_arguments
from tpudist.reduce_op import VariableAggregation, VariableSynchronization
from tpudist.values.array_like import ReadsAsArray


class VariableOfComponents(Protocol):
    """What a component uses of its `state.variable.Variable`, which documents the members."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    strategy: StrategyBase
    on_read: bool

    def conform(self, value: Any) -> jax.Array:
        """Returns `value` as an array of the variable's shape and dtype."""
        ...

    def component_value(self, replica: int) -> jax.Array:
        """Returns the component of one replica."""
        ...

    def set_component(self, replica: int, value: jax.Array) -> None:
        """Sets the component of one replica."""
        ...


class Component(ReadsAsArray):
    """What one replica holds of a Variable: an element of `Variable.values`.

    It reads as an array on that replica's devices, and is used as one. Of an ON_READ variable each
    component can be assigned by itself. Those of a mirrored variable are copies, which are equal
    and stay so: assign the variable. Two components are equal (`==`) if they are the same one; with
    anything else they compare elementwise.

    Outside of replica functions only: there the variable itself stands for its component.
    """

    __slots__ = ("__weakref__", "replica", "variable")

    def __init__(self, variable: VariableOfComponents, replica: int):
        """The component of `variable` on the replica of this number."""
        self.variable, self.replica = variable, replica

    def read_value(self) -> jax.Array:
        """The value on this replica's devices.

        Raises:
            RuntimeError: In a replica function, which is traced once for all replicas.
        """
        self._check_eager("read")
        return self.variable.component_value(self.replica)

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Sets this component of an ON_READ variable, and no other.

        Raises:
            ValueError: The variable is mirrored; or the value does not fit.
            RuntimeError: In a replica function.
        """
        warn_of_op_arguments("assign", use_locking, name)
        return self._change("assign", value, lambda old, new: new, read_value)

    def assign_add(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Adds to this component of an ON_READ variable; see `assign`."""
        warn_of_op_arguments("assign_add", use_locking, name)
        return self._change("assign_add", delta, lambda old, new: old + new, read_value)

    def assign_sub(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Subtracts from this component of an ON_READ variable; see `assign`."""
        warn_of_op_arguments("assign_sub", use_locking, name)
        return self._change("assign_sub", delta, lambda old, new: old - new, read_value)

    def _change(self, what: str, value: Any, combine: Any, read_value: bool) -> jax.Array | None:
        self._check_eager("assigned")
        variable = self.variable
        if not variable.on_read:
            raise ValueError(
                f"{what} of {self.name!r} was called, which is one of the equal copies of a "
                "mirrored variable: the copies would differ then. Assign the variable, which "
                f"changes all copies: variable.{what}(...)."
            )
        value = variable.conform(value)
        if what != "assign":
            old = self.read_value()
            with placement.without_mesh():
                value = combine(old, jax.device_put(value, old.sharding))
        variable.set_component(self.replica, value)
        return self.read_value() if read_value else None

    def _apply(self, operator: str, others: list[Any]) -> Any:
        value = self.read_value()
        with placement.without_mesh():
            return getattr(value, operator)(*others)

    def _check_eager(self, what: str) -> None:
        if context.current().frame is not None:
            raise RuntimeError(
                f"Component {self.name!r} was {what} in a replica function (or in merge_call or "
                "update in one), which is traced once for all replicas. Use the variable: in a "
                "replica function it refers to the replica's own component."
            )

    @property
    def name(self) -> str:
        """The variable's name; from the second replica on, with the replica's number."""
        name = self.variable.name
        return name if self.replica == 0 else f"{name}/replica_{self.replica}"

    @property
    def device(self) -> jax.Device:
        """The replica's device; if it has several, the first."""
        return self.variable.strategy.replica_mesh.devices_of(self.replica)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.variable.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the value."""
        return self.variable.dtype

    @property
    def trainable(self) -> bool:
        """Whether optimizers train the variable."""
        return self.variable.trainable

    @property
    def synchronization(self) -> Any:
        """That of the variable."""
        return self.variable.synchronization

    @property
    def aggregation(self) -> Any:
        """That of the variable."""
        return self.variable.aggregation

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that the variable belongs to."""
        return self.variable.strategy

    def __eq__(self, other: object) -> Any:
        if isinstance(other, Component):
            return self is other  # so that one can be looked for among others
        return super().__eq__(other)

    def __ne__(self, other: object) -> Any:
        return self is not other if isinstance(other, Component) else super().__ne__(other)

    __hash__ = ReadsAsArray.__hash__

    def __repr__(self) -> str:
        shape = ",".join(map(str, self.shape))
        return f"<component {self.name!r} {self.dtype}[{shape}] of a Variable on {self.device}>"

    def __reduce__(self) -> Any:
        self.variable.__reduce__()
