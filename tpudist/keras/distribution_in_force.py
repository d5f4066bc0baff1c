"""Which strategy a Keras model belongs to: by the scope, by Keras' own setting, or by itself."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from tpudist import context
from tpudist.context import ContextKind
from tpudist.context.strategy_base import StrategyBase
from tpudist.keras.mesh_distribution import MeshDistribution, owner_of

# Models that were compiled in a scope: TensorFlow's guides call `fit` outside of it.
_of_models: "weakref.WeakKeyDictionary[Any, MeshDistribution]" = weakref.WeakKeyDictionary()


def distribution_of(strategy: StrategyBase) -> MeshDistribution:
    """The distribution that stands for `strategy`, of which there is one as long as its mesh is."""
    found = strategy._keras_distribution
    if found is None or found.mesh is not strategy.mesh:
        found = strategy._keras_distribution = MeshDistribution(strategy)
    return found


@contextlib.contextmanager
def put(strategy: StrategyBase) -> Iterator[None]:
    """Puts the distribution of `strategy` in force in the `with` block.

    Raises:
        RuntimeError: The program has set a distribution of Keras' own.
    """
    before = keras.distribution.distribution()
    if before is not None and not isinstance(before, MeshDistribution):
        raise _two_distributions(strategy, before)
    keras.distribution.set_distribution(distribution_of(strategy))
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def take_away() -> None:
    """Ends what `current` has put in force in a scope that was entered before Keras was there."""
    if isinstance(keras.distribution.distribution(), MeshDistribution):
        keras.distribution.set_distribution(None)


def current() -> MeshDistribution | None:
    """That of the scope that this is in; None outside of all scopes.

    In a scope it is put in force again if it is not: `keras.utils.clear_session` drops it, and
    Keras may have been imported after the scope was entered.

    Raises:
        RuntimeError: The program has set a distribution of Keras' own in the scope.
    """
    found = keras.distribution.distribution()
    mode = context.current()
    if context.depth() == 0 or mode.kind is not ContextKind.SCOPE:
        return found if isinstance(found, MeshDistribution) else None
    if found is None:
        keras.distribution.set_distribution(distribution_of(mode.strategy))
        return distribution_of(mode.strategy)
    if not isinstance(found, MeshDistribution):
        raise _two_distributions(mode.strategy, found)
    return found


def remember(model: Any, distribution: MeshDistribution) -> None:
    """Notes that `model` was compiled under `distribution`."""
    _of_models[model] = distribution


def of_model(model: Any) -> MeshDistribution | None:
    """That of the scope that this is in, or else of the one that `model` was made in.

    Raises:
        RuntimeError: Those are two, or one is Keras' own.
    """
    here, there = current(), _of_models.get(model)
    if there is None:
        variables = model.variables if model.built else ()
        there = owner_of(variables[0]) if variables else None
    if here is not None and there is not None and here.strategy is not there.strategy:
        raise RuntimeError(
            f"The model {model.name!r} was made in the scope of {there.strategy!r}, but is used in "
            f"the scope of {here.strategy!r}. A model belongs to one strategy. Save its weights, "
            "and load them into a model that you make in the other scope."
        )
    other = keras.distribution.distribution()
    if there is not None and other is not None and not isinstance(other, MeshDistribution):
        raise _two_distributions(there.strategy, other)
    return here or there


def enter(distribution: MeshDistribution) -> contextlib.AbstractContextManager:
    """The scope of its strategy, unless this is in it already."""
    if context.is_in_scope_of(distribution.strategy):
        return contextlib.nullcontext()
    return distribution.strategy.scope()


def enter_of(model: Any) -> contextlib.AbstractContextManager:
    """The scope that `model` belongs to, if it does to any."""
    found = of_model(model)
    return contextlib.nullcontext() if found is None else enter(found)


def _two_distributions(strategy: StrategyBase, other: Any) -> RuntimeError:
    return RuntimeError(
        f"Two Keras distributions conflict: the scope of {strategy!r}, and {other!r}, which the "
        "program has set. Only one can decide where variables live. Remove "
        "keras.distribution.set_distribution (or its scope), or the strategy's scope."
    )
