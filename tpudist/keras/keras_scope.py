"""Connects Keras with the scopes of strategies, if the program uses Keras; does not import it.

Keras reads a global setting, its *distribution*, to place variables and to split batches. A scope
sets a distribution of the strategy. If Keras is imported later, this happens at the end of its
import.
"""

import contextlib
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.keras.method_program import MethodProgram


@contextlib.contextmanager
def enter(strategy: StrategyBase) -> Iterator[None]:
    """Makes new Keras models belong to `strategy` in the `with` block.

    Raises:
        RuntimeError: If the program has set a distribution of Keras' own.
    """
    if not _is_imported():
        _watch_for_import()
        try:
            yield
        finally:
            # Keras was imported in the block, and `current_distribution.current` may have set the
            # distribution of this scope.
            if "tpudist.keras.current_distribution" in sys.modules:
                _remove_distribution()
        return
    if not _connect():
        yield
        return
    from tpudist.keras import current_distribution

    with current_distribution.use(strategy):
        yield


def open_program(
    fn: object,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    in_shardings: PyTree,
    topology: str | None,
    strategy: StrategyBase | None,
) -> MethodProgram | None:
    """Returns the program of a method of a Keras model; None for other functions.

    See `fit_program.open_program`.

    Raises:
        RuntimeError: If this Keras is not supported.
    """
    if not _is_imported():
        return None
    model = fn.__self__ if inspect.ismethod(fn) else fn
    if not isinstance(model, sys.modules["keras"].Model):
        return None
    from tpudist.keras import fit_program, keras_support

    if keras_support.problem is not None:
        raise RuntimeError(keras_support.problem)
    return fit_program.open_program(fn, args, kwargs, in_shardings, topology, strategy)


def watch() -> None:
    """Installs the hooks for functions that strategies compile, now or when Keras is imported."""
    if _is_imported():
        _connect()
    else:
        _watch_for_import()


def _is_imported() -> bool:
    # While Keras is being imported, it is in `sys.modules` without `Model`. Code that runs then may
    # enter a scope too.
    return hasattr(sys.modules.get("keras"), "Model")


def _remove_distribution() -> None:
    from tpudist.keras import current_distribution

    current_distribution.remove()


def _connect() -> bool:
    """Connects Keras; returns whether its models can train in scopes, or raise an error there."""
    from tpudist.keras import keras_support

    # Also for a Keras that is not supported: without the hooks, a compiled function would use the
    # value from its trace forever. With the reason, a read raises an error instead.
    if keras_support.uses_jax():
        from tpudist.keras import captured_variables

        captured_variables.install(keras_support.problem)
    if keras_support.problem is None:
        from tpudist.keras import trainer_hooks

        trainer_hooks.install()
        return True
    keras_support.refuse_training(keras_support.problem)
    return False


class _KerasFinder(importlib.abc.MetaPathFinder):
    """Connects Keras at the end of its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the usual spec of Keras, with a loader that connects it afterwards."""
        if fullname != "keras":
            return None
        # Removed first: `find_spec` below asks all finders again.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("keras")
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                _connect()

            spec.loader.exec_module = exec_module  # each module has a loader of its own
        return spec


def _watch_for_import() -> None:
    if not any(isinstance(finder, _KerasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _KerasFinder())
