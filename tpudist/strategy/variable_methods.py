"""The methods of `strategy.extended` that find, read and place variables."""

import contextlib

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.state import colocation
from tpudist.state.variable import Variable
from tpudist.values.component import Component


class VariableMethods:
    """Finds, reads and places variables; a part of `StrategyExtended`."""

    def __init__(self, strategy: StrategyBase):
        self._strategy = strategy

    def _is_default(self) -> bool:
        return self._strategy is context.default_mode().strategy

    def colocate_vars_with(
        self, colocate_with_variable: Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Places new variables like a given variable, in a `with` block.

        They are split in the same way. If the shape of a new variable does not allow that, the
        strategy's placement rule splits it, on the same devices.

        Raises:
            RuntimeError: If called outside the strategy's scope.
            ValueError: If the argument is not a Variable of this strategy.

        Matches `tf.distribute.StrategyExtended.colocate_vars_with`.
        """
        mode = context.current()
        is_default = self._is_default()
        if not is_default and (mode.strategy is not self._strategy or mode.replica_context):
            raise RuntimeError(
                "colocate_vars_with must be called inside `with strategy.scope()` of "
                f"{self._strategy!r}, where variables are made."
            )
        if not self.variable_created_in_scope(colocate_with_variable):
            if is_default:
                return contextlib.nullcontext()
            raise ValueError(
                f"`colocate_vars_with` must only be passed a variable created in this "
                f"strategy's scope, {self._strategy!r}, not {colocate_with_variable!r}."
            )
        return colocation.colocate_with(self.value_container(colocate_with_variable))

    def variable_created_in_scope(self, v: object) -> bool:
        """Returns whether `v` is a Variable of this strategy, or a component of one."""
        return isinstance(v, Variable | Component) and v.distribute_strategy is self._strategy

    def value_container(self, value: PyTree) -> PyTree:
        """Returns the Variable to which a component belongs; any other value unchanged.

        So `v` is in `strategy.experimental_local_results(strategy.extended.value_container(v))`.
        """
        return value.variable if isinstance(value, Component) else value

    def read_var(self, v: PyTree) -> PyTree:
        """Returns the value of a Variable; any other value unchanged.

        In cross-replica context, the value of an ON_READ Variable is aggregated.
        """
        return v.read_value() if isinstance(v, Variable | Component) else v
