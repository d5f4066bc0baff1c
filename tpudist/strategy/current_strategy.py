"""`tpudist.get_strategy` with the type `Strategy` for type checkers.

`context`, which implements it, is a lower layer, where the result has the type `StrategyBase`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpudist.strategy.strategy import Strategy

    def get_strategy() -> Strategy:
        """Returns the current strategy, or the default strategy outside of every scope.

        Matches `tf.distribute.get_strategy`.
        """
        ...
else:
    from tpudist.context import get_strategy

__all__ = ["get_strategy"]
