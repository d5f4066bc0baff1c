"""The result of `Strategy.scope`."""

import contextlib
from collections.abc import Callable
from typing import Any


class Scope(contextlib.AbstractContextManager):
    """A context manager that you can enter again, in itself and after you left it.

    Args:
        enter: Called at each entry; returns a new context manager.
    """

    def __init__(self, enter: Callable[[], contextlib.AbstractContextManager]):
        self._enter = enter
        # A stack: entries of the same scope in itself end in reverse order.
        self._entered: list[contextlib.AbstractContextManager] = []

    def __enter__(self) -> Any:
        entered = self._enter()
        strategy = entered.__enter__()
        self._entered.append(entered)
        return strategy

    def __exit__(self, *exception) -> bool | None:
        return self._entered.pop().__exit__(*exception)
