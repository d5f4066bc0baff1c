"""Keras' optimizers in replica functions: gradients are summed over the replicas, as TensorFlow's.

Before anything else is done with them: what is clipped, scaled or accumulated is what one device
would have.
"""

import contextvars
import functools
from typing import Any

import keras

from tpudist import context
from tpudist.keras import keras_internals

_are_summed: contextvars.ContextVar[bool] = contextvars.ContextVar("are_summed", default=False)


def are_applied() -> bool:
    """Whether an optimizer applies gradients that it has summed: what it assigns is equal then."""
    return _are_summed.get()


def install() -> None:
    """Puts the hooks in place."""
    for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        owner: Any = next(x for x in kind.__mro__ if "apply" in vars(x))
        owner.apply = _sum_first(owner.apply)


def _sum_first(plain: Any) -> Any:
    @functools.wraps(plain)
    def apply(self, grads, trainable_variables=None):
        mode = context.current()
        is_on_replicas = mode.frame is not None and mode.replica_context is not None
        if not is_on_replicas or _are_summed.get() or keras_internals.is_in_stateless_scope():
            return plain(self, grads, trainable_variables)
        assert mode.replica_context is not None
        token = _are_summed.set(True)
        try:
            summed = mode.replica_context.all_reduce("sum", list(grads))
            return plain(self, summed, trainable_variables)
        finally:
            _are_summed.reset(token)

    return apply
