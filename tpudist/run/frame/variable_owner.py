"""The Variables that a replica function may use: of its own strategy, and guests."""

from typing import Any

from tpudist import context
from tpudist.context.protocols import VariableLike
from tpudist.context.strategy_base import StrategyBase


def owns(strategy: StrategyBase, variable: Any) -> bool:
    """Whether `variable` belongs to `strategy`, or to the strategy whose twin it is."""
    return variable.strategy in (strategy, strategy._twin_of)


def is_guest(variable: Any, strategy: StrategyBase) -> bool:
    """Whether a function of `strategy` may read `variable` although another strategy has it.

    That is a Variable that was created outside of all scopes, or lives on a parameter server.
    """
    if variable.is_on_servers:
        return True
    default = context.default_mode().strategy
    return not owns(strategy, variable) and variable.strategy is default and not variable.on_read


def has_value(variable: VariableLike) -> bool:
    """Whether a Variable has its initial value, which a function that creates it computes later."""
    # A Variable of tpudist or Keras gets this attribute only when its initial value is known.
    return getattr(variable, "_value", None) is not None


def check_owner(variable: Any, strategy: StrategyBase) -> None:
    """Raises for a Variable of another strategy, and for one without a value.

    Raises:
        RuntimeError: If `variable` must not be used in a function of `strategy`.
    """
    if not owns(strategy, variable):
        raise RuntimeError(
            f"Variable '{variable.name}' was made under {variable.strategy!r}, but is used in a "
            f"replica function of {strategy!r}. Make it in the scope of the strategy that runs the "
            "function: with strategy.scope(): ..."
        )
    if not has_value(variable):
        raise RuntimeError(
            f"Variable '{variable.name}' has no value: the replica function that made it failed "
            "before its initial value was computed. Make the Variable again."
        )
