"""Checks whether this Keras can train in a scope, and makes it raise an error if it cannot."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tpudist import context
from tpudist.context import ContextKind
from tpudist.keras import keras_internals

OLDEST = (3, 15)  # the first version with the methods of `keras_internals`, and the tested one
_OLDEST = ".".join(map(str, OLDEST))
METHODS = (
    "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch",
)  # fmt: skip


def find_problem() -> str | None:
    """Returns the reason why this Keras cannot train in a scope; None if it can."""
    version = keras.__version__
    numbers = tuple(int(x) for x in version.split(".")[:2] if x.isdecimal())
    if numbers < OLDEST:
        return (
            f"Keras is {version}, but a strategy's scope needs {_OLDEST} or later: pip install "
            f'--upgrade "keras>={_OLDEST}".'
        )
    backend = keras.backend.backend()
    if backend != "jax":
        return (
            f"Keras computes with {backend}, but the strategy's devices belong to JAX. Set the "
            'environment variable KERAS_BACKEND to "jax" before you import Keras (or "backend" in '
            "~/.keras/keras.json), or leave the strategy's scope."
        )
    if keras_internals.is_nnx_enabled():
        return (
            "Keras was started with KERAS_NNX_ENABLED, which makes its variables Flax NNX "
            "variables. A strategy's scope does not support them. Unset it, or train the model as "
            "an NNX module with strategy.run."
        )
    changed = keras_internals.list_changes()
    if changed:
        return (
            f"Keras {version} differs from the versions that tpudist knows ({_OLDEST}): "
            f"{'; '.join(changed)}. Install one of those, or train without the scope."
        )
    return None


def uses_jax() -> bool:
    """Returns whether Keras computes with JAX, so that compiled functions can use its variables."""
    return keras.backend.backend() == "jax"


_replaced: set[tuple[type, str]] = set()  # classes and their methods that raise an error


def refuse_training(reason: str) -> None:
    """Makes a model's `compile` and training methods raise an error in a strategy's scope."""
    # `compile` as well, because a program may call `fit` after the scope, where nothing shows that
    # the model was created in it.
    for name in ("compile", *METHODS):
        owner = next((c for c in keras.Model.__mro__ if name in vars(c)), None)
        if owner is not None and (owner, name) not in _replaced:
            _replaced.add((owner, name))
            refuse = functools.partial(_refuse, name=name, reason=reason)
            keras_internals.replace_method(owner, name, refuse)


def _refuse(plain: Callable[..., Any], *, name: str, reason: str) -> Callable[..., Any]:
    def refuse(self, *args, **kwargs):
        mode = context.current()
        if context.depth() and mode.kind is ContextKind.SCOPE:
            raise RuntimeError(
                f"{name} of a Keras model was called in the scope of {mode.strategy!r}. {reason}"
            )
        return plain(self, *args, **kwargs)

    return refuse


# Computed once: nothing of this changes while a program runs.
problem = find_problem()
