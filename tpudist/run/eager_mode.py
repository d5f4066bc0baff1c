"""Decides whether functions run eagerly: `strategy.debug()`, `tpudist.run_functions_eagerly`."""

import contextlib
import contextvars
from collections.abc import Iterator

from tpudist.context.strategy_base import StrategyBase
from tpudist.xla.settings import Setting

everywhere = False
_is_jit_disabled = Setting.DISABLE_JIT.make_reader()
_strategies: contextvars.ContextVar[tuple[StrategyBase, ...]] = contextvars.ContextVar(
    "tpudist.debug", default=()
)
debugged = _strategies.get
"""Returns the strategies whose `debug` is in force here; the reader of a `ContextVar` is fast."""


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Makes all replica functions and `tpudist.function`s run eagerly, or be compiled again.

    Eagerly, `Strategy.run` calls the function for one replica after the other, in Python, with the
    values of its arrays. `Strategy.debug` does so in a `with` block.

    Args:
        run_eagerly: Whether functions run eagerly.

    Raises:
        TypeError: If `run_eagerly` is not a bool.

    Matches `tf.config.run_functions_eagerly`. tpudist compiles all replica functions; TensorFlow
    compiles only functions that a `tf.function` calls.
    """
    if not isinstance(run_eagerly, bool):
        raise TypeError(
            f"run_functions_eagerly({run_eagerly!r}): the argument must be a bool, not "
            f"{type(run_eagerly).__name__}. Pass True to run functions eagerly, or False."
        )
    global everywhere
    everywhere = run_eagerly


def functions_run_eagerly() -> bool:
    """Whether `run_functions_eagerly(True)` was called last.

    Matches `tf.config.functions_run_eagerly`.
    """
    return everywhere


@contextlib.contextmanager
def debug(strategy: StrategyBase) -> Iterator[None]:
    """Makes functions of `strategy`, and `tpudist.function`s, run eagerly in the `with` block."""
    token = _strategies.set((*_strategies.get(), strategy))
    try:
        yield
    finally:
        _strategies.reset(token)


def is_eager(strategy: StrategyBase | None = None) -> bool:
    """Whether functions of `strategy` run eagerly; if None, of a strategy not known yet.

    `jax.disable_jit()` has the same effect. It is on the path of each call.
    """
    if everywhere or _is_jit_disabled():
        return True
    strategies = _strategies.get()
    return bool(strategies) and (strategy is None or strategy in strategies)
