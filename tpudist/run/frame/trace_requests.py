"""Exceptions that end a trace because it needs something first; the function is traced again then.

The frame raises them while the user's function runs:

| request | caught by | before the function is traced again |
|---|---|---|
| `TraceAgain` | `step.Step.attempt` | calls `prepare` |
| `NextElement` | `function.Function._call` | takes one more element of the iterator |
| `OtherStrategy` | `function.Function._call` | belongs to that strategy |
| `LocalState` | `step_cache.Replicator` | gives NNX Variables one value per replica |
| `MakesVariables` | `planner.strategy_methods` | creates its Variables on its own devices |

Retries end, because each request names a new Variable, capture, element or strategy, and a function
has finitely many of these.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn

import jax

from tpudist.context.strategy_base import StrategyBase


class TraceAgain(BaseException):
    """The trace lacks an input that the next one has: a Variable, a capture, a guest, a reference.

    Not an `Exception`, so that no handler of the user takes it for a failure.

    Attributes:
        prepare: Called outside of all traces before the next one, with a function that returns the
            flat inputs of the call. By default, the next trace finds the input by itself.
    """

    def __init__(
        self, prepare: Callable[[Callable[[], list[jax.Array]]], None] = lambda inputs: None
    ):
        super().__init__()
        self.prepare = prepare


class LocalState(BaseException):
    """NNX Variables must have one value per replica before the trace: see `local_state`.

    Attributes:
        leaves: Pairs of a leaf of the binding and an array of that leaf.
    """

    def __init__(self, leaves: Collection[tuple[int, int]]):
        super().__init__()
        self.leaves = frozenset(leaves)


class MakesVariables(BaseException):
    """A function that is traced for devices that do not exist here creates Variables.

    They must be created on the devices of its own strategy first.
    """


class OtherStrategy(BaseException):
    """A function that was called outside of every scope belongs to `strategy`."""

    def __init__(self, strategy: StrategyBase):
        super().__init__()
        self.strategy = strategy


class NextElement(TraceAgain):
    """A function takes one more element of `iterator` than it received."""

    def __init__(self, iterator: Iterator[Any]):
        super().__init__(self._pass_on)
        self.iterator = iterator

    def _pass_on(self, _) -> NoReturn:
        # `Step.attempt` catches every `TraceAgain`, but `Function` has the iterators.
        raise self
