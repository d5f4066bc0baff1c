"""The optimizer state for `tpudist.Variable`s ("slots"), which `Optimizer` creates and updates.

Each slot is a Variable of the same strategy as the trained Variables, so it is placed, saved and
captured like them. The state for NNX models is in `nnx.Optimizer.opt_state` instead.
"""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.run.frame.trace_requests import TraceAgain
from tpudist.state.variable import Variable


class Slots:
    """The slots of one optimizer, as Variables of the same strategy.

    Attributes:
        strategy: Strategy whose parameter servers store the state; None if this process does.
        on_servers: Variables whose slots the servers store; empty until they are known.
    """

    def __init__(self, strategy: Any):
        self.strategy = strategy  # a ParameterServerStrategy, of a higher layer
        self.on_servers: list[Variable] = []
        self._variable_names: list[str] | None = None  # of the Variables that have slots
        self._tree: PyTree = None

    def variables(self) -> list[Variable]:
        """Returns the slots, in the order of the state; none before they exist."""
        return jax.tree.leaves(self._tree, is_leaf=is_variable)

    def state(self) -> PyTree:
        """Returns the optimizer state with a Variable for each array; None before it exists."""
        return self._tree

    def get_or_create(
        self, tx: optax.GradientTransformation, names: list[str], variables: list[Variable]
    ) -> PyTree:
        """Returns the slots for `variables`. The first call creates them."""
        variable_names = [v.name for v in variables]
        if self._variable_names is None:
            # Values of a trace do not outlive it. So the exception ends the trace, its handler
            # creates the slots, and the function is traced again. The second trace finds them.
            frame = context.current().frame
            if frame is None:
                self._create(tx, names, variables)
            elif frame.is_eager:
                frame.run_outside(lambda: self._create(tx, names, variables))
            else:
                raise TraceAgain(lambda _: self._create(tx, names, variables))
        if self._variable_names != variable_names:
            raise ValueError(
                f"apply_gradients was first called for the Variables {self._variable_names}, and "
                f"now for {variable_names}. Pass all trained Variables in each call, in the same "
                "order."
            )
        return self._tree

    def _create(
        self, tx: optax.GradientTransformation, names: list[str], variables: list[Variable]
    ) -> None:
        strategy = variables[0].strategy
        current = {n: v._value for n, v in zip(names, variables, strict=True)}
        with strategy.scope():
            flat, treedef = jax.tree_util.tree_flatten_with_path(tx.init(current))
            slots = [
                Variable(value, name=f"optimizer{jax.tree_util.keystr(path)}", trainable=False)
                for path, value in flat
            ]
        self._tree = jax.tree.unflatten(treedef, slots)
        self._variable_names = [v.name for v in variables]


def unique_names(variables: Sequence[Variable]) -> list[str]:
    """Returns a distinct name for each Variable; the names are keys of checkpoints."""
    # Optax sees a dict, which JAX sorts by key: the index keeps the order of the Variables. A
    # Variable without a name is called after its index too, because its default name has a number
    # that differs between processes.
    names = [v.name if v.is_named else f"Variable_{i}" for i, v in enumerate(variables)]
    return [f"{i:04d} {name}" for i, name in enumerate(names)]


def is_variable(x: object) -> bool:
    """Returns whether `x` is a `tpudist.Variable`, as a leaf of the state."""
    return isinstance(x, Variable)
