"""Why this Keras cannot train in a scope, said where a program asks it to."""

import functools
from typing import Any

import keras

from tpudist import context
from tpudist.context import ContextKind
from tpudist.keras import keras_internals

OLDEST = (3, 15)
TESTED = "3.15"
TRAINING = (
    "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch",
)  # fmt: skip


def why_not() -> str | None:
    """Why Keras, as it is here, cannot train in a scope; None if it can."""
    version = getattr(keras, "__version__", "of no version")
    numbers = tuple(int(x) for x in version.split(".")[:2] if x.isdecimal())
    if numbers < OLDEST:
        return (
            f"Keras is {version}, but a strategy's scope needs {TESTED} or later: pip install "
            f'--upgrade "keras>={TESTED}".'
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
            f"Keras {version} differs from the versions that tpudist knows ({TESTED}): "
            f"{'; '.join(changed)}. Install one of those, or train without the scope."
        )
    return None


def is_of_jax() -> bool:
    """Whether Keras computes with JAX, so that its variables can be in compiled functions."""
    return keras.backend.backend() == "jax"


_refused: set[tuple[type, str]] = set()


def refuse_training(reason: str) -> None:
    """Has a model's `compile` and the methods that train raise in a strategy's scope; once.

    `fit` may be called after the scope, where nothing tells that the model was made in it.
    """
    for name in ("compile", *TRAINING):
        owner = next((c for c in keras.Model.__mro__ if name in vars(c)), None)
        if owner is not None and (owner, name) not in _refused:
            _refused.add((owner, name))
            setattr(owner, name, _refuse(vars(owner)[name], name, reason))


def _refuse(plain: Any, name: str, reason: str) -> Any:
    @functools.wraps(plain)
    def refuse(self, *args, **kwargs):
        mode = context.current()
        if context.depth() and mode.kind is ContextKind.SCOPE:
            raise RuntimeError(
                f"{name} of a Keras model was called in the scope of {mode.strategy!r}. {reason}"
            )
        return plain(self, *args, **kwargs)

    return refuse


# Asked once: none of it changes while a program runs.
reason = why_not()
