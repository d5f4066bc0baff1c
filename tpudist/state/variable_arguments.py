"""Checks of the arguments of `Variable`, and the properties of a Variable that follow from them.

Its value is not looked at here; see `variable_value`.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from tpudist.context.strategy_base import VariableHome
from tpudist.options import shorten
from tpudist.processes import generations
from tpudist.reduce_op import VariableAggregation, VariableSynchronization

# One count for the whole process: a Variable without a name may get another number in another
# process, so messages that compare processes use only names that you passed.
_numbers = generations.Numbers()

_Member = TypeVar("_Member", bound=enum.Enum)


@dataclasses.dataclass(frozen=True)
class VariableArguments:
    """The arguments of one Variable that are independent of its value; see `Variable`.

    Under a strategy without components (one replica on one device, or state in one place) there is
    one copy of each Variable: `on_read` is False there, and `synchronization` is only stored.
    """

    name: str
    is_named: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    constraint: Callable[[jax.Array], Any] | None
    trainable: bool
    on_read: bool


def check_arguments(
    *,
    name: str | None,
    trainable: bool | None,
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
    constraint: Callable[[jax.Array], Any] | None,
    home: VariableHome,
) -> VariableArguments:
    """Returns the checked arguments, with defaults filled in for a strategy with this `home`.

    Raises:
        TypeError: If `name` is not a string.
        ValueError: If another argument is invalid.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"Variable(name={shorten(name)}): name must be a string or None.")
    is_named = name is not None
    name = f"Variable_{next(_numbers)}" if name is None else name
    _check_member(VariableSynchronization, synchronization, "synchronization", name)
    _check_member(VariableAggregation, aggregation, "aggregation", name)
    if constraint is not None and not callable(constraint):
        raise ValueError(
            f"Variable '{name}' was made with constraint={shorten(constraint)}. Pass a "
            "function of the value, or None."
        )
    has_components = home is VariableHome.COMPONENTS
    if synchronization is VariableSynchronization.NONE and has_components:
        raise ValueError(
            f"Variable '{name}' was made with VariableSynchronization.NONE, which is not "
            f"supported with strategies: use ON_READ for one component per replica."
        )
    is_on_read = synchronization is VariableSynchronization.ON_READ
    if synchronization is VariableSynchronization.AUTO and has_components:
        synchronization = VariableSynchronization.ON_WRITE
    return VariableArguments(
        name=name,
        is_named=is_named,
        synchronization=synchronization,
        aggregation=aggregation,
        constraint=constraint,
        # As in TensorFlow, also where ON_READ has no effect on the number of copies.
        trainable=not is_on_read if trainable is None else bool(trainable),
        on_read=is_on_read and has_components,
    )


def _check_member(cls: type[_Member], value: object, parameter: str, name: str) -> None:
    if not isinstance(value, cls):
        names = ", ".join(f"{cls.__name__}.{m}" for m in cls.__members__)
        raise ValueError(
            f"Variable '{name}' was made with {parameter}={shorten(value)}. Use one of {names}."
        )
