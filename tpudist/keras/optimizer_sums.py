"""Makes Keras' optimizers sum gradients over the replicas in replica functions, as in TensorFlow.

The sum comes first, so an optimizer clips, scales and accumulates the same gradients as on one
device.
"""

import contextvars
from collections.abc import Callable
from typing import Any

import keras

from tpudist import context
from tpudist.keras import keras_internals

_is_applying: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "is_applying_sums", default=False
)


def is_applying_sums() -> bool:
    """Returns whether an optimizer applies summed gradients: its assignments are then equal."""
    return _is_applying.get()


def install() -> None:
    """Installs the hooks."""
    for optimizer_class in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        # The classes that define `apply`: in Keras 3.15, BaseOptimizer and LossScaleOptimizer.
        owner = next(x for x in optimizer_class.__mro__ if "apply" in vars(x))
        keras_internals.replace_method(owner, "apply", _sum_first)


def _sum_first(plain: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self, grads, trainable_variables=None):
        mode = context.current()
        is_on_replicas = mode.frame is not None and mode.replica_context is not None
        if not is_on_replicas or _is_applying.get() or keras_internals.is_in_stateless_scope():
            return plain(self, grads, trainable_variables)
        assert mode.replica_context is not None
        # `apply` may call another `apply`, as LossScaleOptimizer does: sum only in the outermost.
        token = _is_applying.set(True)
        try:
            summed = mode.replica_context.all_reduce("sum", list(grads))
            return plain(self, summed, trainable_variables)
        finally:
            _is_applying.reset(token)

    return apply
