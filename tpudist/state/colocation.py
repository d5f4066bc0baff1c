"""New variables beside another one: what `extended.colocate_vars_with` has asked for."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from tpudist.context.strategy_base import StrategyBase
from tpudist.state.variable_base import VariableBase

_beside: contextvars.ContextVar[Any] = contextvars.ContextVar("tpudist.beside", default=None)


@contextlib.contextmanager
def colocate_with(variable: VariableBase) -> Iterator[None]:
    """Variables made in the `with` block are split over devices as `variable` is."""
    token = _beside.set(variable)
    try:
        yield
    finally:
        _beside.reset(token)


def neighbor() -> VariableBase | None:
    """The variable beside which new ones are to be, or None."""
    return _beside.get()


def spec_for(strategy: StrategyBase, shape: tuple[int, ...]) -> PartitionSpec | None:
    """How a new variable of `strategy` is to be split; None if that is for the strategy to say.

    A shape that cannot be split so is left to the strategy too: it is on the same devices.
    """
    variable = _beside.get()
    if variable is None or variable.strategy is not strategy or variable.on_read:
        return None
    sharding = getattr(variable._value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    spec = sharding.spec
    return spec if _divides(shape, spec, sharding.mesh.shape) else None


def _divides(shape: tuple[int, ...], spec: PartitionSpec, sizes: Any) -> bool:
    if len(spec) > len(shape):
        return False
    for size, names in zip(shape, spec, strict=False):
        for name in names if isinstance(names, tuple) else (names,):
            if name is not None and size % sizes[name]:
                return False
            size //= sizes[name] if name is not None else 1
    return True
