"""Placement of new variables next to another variable, for `extended.colocate_vars_with`."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

from jax.sharding import NamedSharding, PartitionSpec

from tpudist.array_types import Shape
from tpudist.context.strategy_base import StrategyBase
from tpudist.state.variable_base import VariableBase
from tpudist.xla.array_attributes import sharding_of

_neighbor: contextvars.ContextVar[VariableBase | None] = contextvars.ContextVar(
    "tpudist.neighbor", default=None
)


@contextlib.contextmanager
def colocate_with(variable: VariableBase) -> Iterator[None]:
    """Splits variables made in the `with` block over devices like `variable`."""
    token = _neighbor.set(variable)
    try:
        yield
    finally:
        _neighbor.reset(token)


def neighbor() -> VariableBase | None:
    """Returns the variable next to which new variables are placed, or None."""
    return _neighbor.get()


def spec_for(strategy: StrategyBase, shape: Shape) -> PartitionSpec | None:
    """Returns the split of a new variable of `strategy`; None if the strategy decides.

    The strategy also decides if `shape` does not divide like the neighbor: all variables of a
    strategy are on the same devices in any case.
    """
    variable = _neighbor.get()
    if variable is None or variable.strategy is not strategy or variable.on_read:
        return None
    # Without a sharding: the value is still being traced, or a parameter server stores it.
    sharding = sharding_of(variable._value)
    if not isinstance(sharding, NamedSharding):
        return None
    spec = sharding.spec
    return spec if _divides(shape, spec, sharding.mesh.shape) else None


def _divides(shape: Shape, spec: PartitionSpec, sizes: Mapping[str, int]) -> bool:
    if len(spec) > len(shape):
        return False
    for size, names in zip(shape, spec, strict=False):
        for name in names if isinstance(names, tuple) else (names,):
            if name is not None and size % sizes[name]:
                return False
            size //= sizes[name] if name is not None else 1
    return True
