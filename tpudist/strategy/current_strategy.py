"""`tpudist.get_strategy`: that of `context`, with the class that it returns for type checkers.

`context` is a lower layer than `Strategy`, so there the result is a `StrategyBase`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpudist.strategy.strategy import Strategy

    def get_strategy() -> Strategy:
        """The current strategy, or the default one outside of every scope.

        As `tf.distribute.get_strategy`.
        """
        ...
else:
    from tpudist.context import get_strategy

__all__ = ["get_strategy"]
