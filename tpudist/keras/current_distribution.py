"""Finds the strategy of a Keras model: from the scope, from Keras' setting, or from the model."""

import contextlib
import weakref
from collections.abc import Iterator

import keras

from tpudist import context
from tpudist.context import ContextKind
from tpudist.context.strategy_base import StrategyBase
from tpudist.keras.mesh_distribution import MeshDistribution, owner_of

# Models that were compiled in a scope: TensorFlow's guides call `fit` outside of it.
_of_models: "weakref.WeakKeyDictionary[keras.Model, MeshDistribution]" = weakref.WeakKeyDictionary()


def distribution_of(strategy: StrategyBase) -> MeshDistribution:
    """Returns the distribution of `strategy`, the same one as long as it has the same mesh."""
    distribution = strategy._keras_distribution
    if distribution is None or distribution.mesh is not strategy.mesh:
        distribution = strategy._keras_distribution = MeshDistribution(strategy)
    return distribution


@contextlib.contextmanager
def use(strategy: StrategyBase) -> Iterator[None]:
    """Makes the distribution of `strategy` Keras' distribution in the `with` block.

    Raises:
        RuntimeError: If the program has set a distribution of Keras' own.
    """
    before = keras.distribution.distribution()
    if before is not None and not isinstance(before, MeshDistribution):
        raise _two_distributions(strategy, before)
    keras.distribution.set_distribution(distribution_of(strategy))
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def remove() -> None:
    """Removes a distribution that `current` has set in a scope older than Keras' import."""
    if isinstance(keras.distribution.distribution(), MeshDistribution):
        keras.distribution.set_distribution(None)


def current() -> MeshDistribution | None:
    """Returns the distribution of the active scope; None outside of all scopes.

    In a scope, sets Keras' distribution if it is missing: `keras.utils.clear_session` drops it, and
    Keras may have been imported after the scope was entered.

    Raises:
        RuntimeError: If the program has set a distribution of Keras' own in the scope.
    """
    distribution = keras.distribution.distribution()
    mode = context.current()
    if context.depth() == 0 or mode.kind is not ContextKind.SCOPE:
        return distribution if isinstance(distribution, MeshDistribution) else None
    if distribution is None:
        keras.distribution.set_distribution(distribution_of(mode.strategy))
        return distribution_of(mode.strategy)
    if not isinstance(distribution, MeshDistribution):
        raise _two_distributions(mode.strategy, distribution)
    return distribution


def remember(model: keras.Model, distribution: MeshDistribution) -> None:
    """Records that `model` was compiled under `distribution`."""
    _of_models[model] = distribution


def of_model(model: keras.Model) -> MeshDistribution | None:
    """Returns the distribution of the active scope, or else of the scope that created `model`.

    Raises:
        RuntimeError: If these are two, or if one is Keras' own.
    """
    of_scope, own = current(), _of_models.get(model)
    if own is None:
        # A model that was created but not compiled in the scope: its variables remember the scope.
        variables = model.variables if model.built else ()
        own = owner_of(variables[0]) if variables else None
    if of_scope is not None and own is not None and of_scope.strategy is not own.strategy:
        raise RuntimeError(
            f"The model {model.name!r} was made in the scope of {own.strategy!r}, but is used in "
            f"the scope of {of_scope.strategy!r}. A model belongs to one strategy. Save its "
            "weights, and load them into a model that you make in the other scope."
        )
    other = keras.distribution.distribution()
    if own is not None and other is not None and not isinstance(other, MeshDistribution):
        raise _two_distributions(own.strategy, other)
    return of_scope or own


def enter_scope(distribution: MeshDistribution) -> contextlib.AbstractContextManager:
    """Returns the scope of the distribution's strategy, unless it is active already."""
    if context.is_in_scope_of(distribution.strategy):
        return contextlib.nullcontext()
    return distribution.strategy.scope()


def enter_scope_of(model: keras.Model) -> contextlib.AbstractContextManager:
    """Returns the scope to which `model` belongs, if any."""
    distribution = of_model(model)
    return contextlib.nullcontext() if distribution is None else enter_scope(distribution)


def _two_distributions(strategy: StrategyBase, other: object) -> RuntimeError:
    return RuntimeError(
        f"Two Keras distributions conflict: the scope of {strategy!r}, and {other!r}, which the "
        "program has set. Only one can decide where variables live. Remove "
        "keras.distribution.set_distribution (or its scope), or the strategy's scope."
    )
