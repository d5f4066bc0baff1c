"""The scope of a strategy."""

import contextlib
from collections.abc import Callable
from typing import Any


class Scope(contextlib.AbstractContextManager):
    """A scope that can be entered again, in itself and after it was left."""

    def __init__(self, enter: Callable[[], contextlib.AbstractContextManager]):
        """`enter` makes what is entered each time."""
        self._enter = enter
        self._entered: list[contextlib.AbstractContextManager] = []

    def __enter__(self) -> Any:
        entered = self._enter()
        strategy = entered.__enter__()
        self._entered.append(entered)
        return strategy

    def __exit__(self, *exception) -> bool | None:
        return self._entered.pop().__exit__(*exception)
