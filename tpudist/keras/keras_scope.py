"""What a strategy's scope does for Keras, if the program uses it; imports nothing of Keras itself.

Keras asks a global setting, its *distribution*, where variables live and how batches are split. A
scope puts one of the strategy's own in its place. Where Keras is imported after that, it is done
at the end of the import.
"""

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from tpudist.context.strategy_base import StrategyBase


@contextlib.contextmanager
def enter(strategy: StrategyBase) -> Iterator[None]:
    """Has Keras models that are made in the `with` block belong to `strategy`.

    Raises:
        RuntimeError: The program has set a distribution of Keras' own.
    """
    keras = sys.modules.get("keras")
    if keras is None or not hasattr(keras, "Model"):  # the latter: this is called in its import
        _watch_for_import()
        try:
            yield
        finally:
            if "tpudist.keras.distribution_in_force" in sys.modules:  # it was imported in the block
                _leave()
        return
    if not _connect():
        yield
        return
    from tpudist.keras import distribution_in_force

    with distribution_in_force.put(strategy):
        yield


def watch() -> None:
    """Has Keras, if it is imported or will be, know of the functions that strategies compile."""
    keras = sys.modules.get("keras")
    if keras is None or not hasattr(keras, "Model"):
        _watch_for_import()
    else:
        _connect()


def _leave() -> None:
    from tpudist.keras import distribution_in_force

    distribution_in_force.take_away()


def _connect() -> bool:
    """Has Keras know of strategies, or refuse to train in their scopes; whether it knows them."""
    from tpudist.keras import refusals

    if refusals.is_of_jax():
        from tpudist.keras import captured_variables

        captured_variables.install(refusals.reason)
    if refusals.reason is None:
        from tpudist.keras import trainer_hooks

        trainer_hooks.install()
        return True
    refusals.refuse_training(refusals.reason)
    return False


class _KerasFinder(importlib.abc.MetaPathFinder):
    """Connects Keras at the end of its import."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The spec of Keras that the others find, of which the loader does one thing more."""
        if fullname != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("keras")
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                _connect()

            spec.loader.exec_module = exec_module  # the loader is that of this module alone
        return spec


def _watch_for_import() -> None:
    if not any(isinstance(finder, _KerasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _KerasFinder())
