"""The component of a variable on one replica."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.typing import ArrayLike

from tpudist import context
from tpudist.context.strategy_base import StrategyBase
from tpudist.lowering import placement
from tpudist.options import warn_of_op_arguments
from tpudist.reduce_op import VariableAggregation, VariableSynchronization
from tpudist.values.array_like import ReadsAsArray, apply_operator


class VariableOfComponents(Protocol):
    """The members of `state.variable.Variable` that a component uses."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    strategy: StrategyBase
    on_read: bool

    def conform(self, value: ArrayLike) -> jax.Array:
        """Returns `value` as an array of the variable's shape and dtype."""
        ...

    def component_value(self, replica: int) -> jax.Array:
        """Returns the component of one replica."""
        ...

    def set_component(self, replica: int, value: jax.Array) -> None:
        """Sets the component of one replica."""
        ...


class Component(ReadsAsArray):
    """The component of a Variable on one replica: an element of `Variable.values`.

    It is used as an array on that replica's devices. You can assign each component of an ON_READ
    variable separately. The components of a mirrored variable are equal copies: assign the
    variable. `==` of two components compares by identity; with anything else it is elementwise.

    Use it only outside of replica functions. In them the variable refers to the replica's own
    component.

    Args:
        variable: The variable.
        replica: Number of the replica.
    """

    __slots__ = ("__weakref__", "replica", "variable")

    def __init__(self, variable: VariableOfComponents, replica: int):
        self.variable, self.replica = variable, replica

    def read_value(self) -> jax.Array:
        """Returns the value on this replica's devices.

        Raises:
            RuntimeError: If called in a replica function, which is traced once for all replicas.
        """
        self._check_eager("read")
        return self.variable.component_value(self.replica)

    def assign(
        self,
        value: ArrayLike,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Sets this component of an ON_READ variable, and no other.

        Raises:
            ValueError: If the variable is mirrored, or the value does not fit.
            RuntimeError: If called in a replica function.
        """
        warn_of_op_arguments("assign", use_locking, name)
        return self._change("assign", value, lambda old, new: new, read_value)

    def assign_add(
        self,
        delta: ArrayLike,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Adds to this component of an ON_READ variable; see `assign`."""
        warn_of_op_arguments("assign_add", use_locking, name)
        return self._change("assign_add", delta, lambda old, new: old + new, read_value)

    def assign_sub(
        self,
        delta: ArrayLike,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Subtracts from this component of an ON_READ variable; see `assign`."""
        warn_of_op_arguments("assign_sub", use_locking, name)
        return self._change("assign_sub", delta, lambda old, new: old - new, read_value)

    def _change(
        self,
        method: str,
        value: ArrayLike,
        combine: Callable[[jax.Array, jax.Array], jax.Array],
        read_value: bool,
    ) -> jax.Array | None:
        self._check_eager("assigned")
        variable = self.variable
        if not variable.on_read:
            raise ValueError(
                f"{method} of {self.name!r} was called, which is one of the equal copies of a "
                "mirrored variable: the copies would differ then. Assign the variable, which "
                f"changes all copies: variable.{method}(...)."
            )
        new = variable.conform(value)
        if method != "assign":
            # Both operands are on this replica's devices. Inside the mesh of a scope, JAX would
            # reject arrays that are on a part of its devices.
            old = self.read_value()
            with placement.without_mesh():
                new = combine(old, jax.device_put(new, old.sharding))
        variable.set_component(self.replica, new)
        return self.read_value() if read_value else None

    def _apply(self, operator: str, others: list[Any]) -> Any:
        value = self.read_value()
        with placement.without_mesh():
            return apply_operator(value, operator, others)

    def _check_eager(self, access: str) -> None:
        if context.current().frame is not None:
            raise RuntimeError(
                f"Component {self.name!r} was {access} in a replica function (or in merge_call or "
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

    # `ReadsAsArray` declares an attribute.
    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
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
    def synchronization(self) -> VariableSynchronization:
        """Synchronization of the variable."""
        return self.variable.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """Aggregation of the variable."""
        return self.variable.aggregation

    @property
    def distribute_strategy(self) -> StrategyBase:
        """The strategy that the variable belongs to."""
        return self.variable.strategy

    def __eq__(self, other: object) -> Any:
        if isinstance(other, Component):
            return self is other  # so that `component in variable.values` works
        return super().__eq__(other)

    def __ne__(self, other: object) -> Any:
        return self is not other if isinstance(other, Component) else super().__ne__(other)

    __hash__ = ReadsAsArray.__hash__

    def __repr__(self) -> str:
        shape = ",".join(map(str, self.shape))
        return f"<component {self.name!r} {self.dtype}[{shape}] of a Variable on {self.device}>"

    def __reduce__(self) -> Any:
        # A component cannot be pickled without its variable, and `Variable.__reduce__` raises.
        return self.variable.__reduce__()
