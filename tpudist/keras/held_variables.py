"""Gradients by variables of Keras: `value_and_grad`, and what the variables hold meanwhile."""

import contextvars
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tpudist import context
from tpudist.keras import keras_internals
from tpudist.xla.hlo.source_lines import line_of_call

_NONE: Mapping[int, jax.Array] = types.MappingProxyType({})
_held: contextvars.ContextVar[Mapping[int, jax.Array]] = contextvars.ContextVar(
    "held", default=_NONE
)


def find(variable: Any) -> jax.Array | None:
    """What a variable holds where it is differentiated by; None elsewhere.

    And None where a stateless call says what it holds.
    """
    held = _held.get().get(id(variable))
    return held if held is None or not keras_internals.is_in_stateless_scope(variable) else None


def is_differentiating() -> bool:
    """Whether this is in a function that `value_and_grad` differentiates."""
    return bool(_held.get())


def value_and_grad(
    fn: Callable[..., Any], variables: Any, *, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that gives what `fn` gives, and its gradients by variables of Keras.

    For replica functions, in the place of `tf.GradientTape`: `fn` computes the loss with the model
    itself, and what it assigns (statistics of batches, seeds, metrics) is kept.

    Args:
        fn: Gives a floating scalar, the loss of the replica's examples; with `has_aux` a pair of
            that and anything else. It is called once, with the arguments of the result.
        variables: Of Keras: a sequence of them; a layer or model, for its trainable variables; or a
            function without arguments that gives them, which is asked when `fn` has been called:
            for models that are built by their first call.
        has_aux: Whether `fn` gives a pair.

    Returns:
        A function with the arguments of `fn`. It gives a pair: what `fn` gives, and a list with a
        gradient of the shape and dtype of each variable, of this replica's loss alone: Keras'
        optimizers sum them over the replicas.

    Raises:
        RuntimeError: It is called outside of replica functions, where what `fn` assigns would be
            values of JAX's trace.
        TypeError: What is given are no variables of Keras.
        ValueError: There are none.
    """

    def compute(*args: Any, **kwargs: Any) -> Any:
        frame = context.current().frame
        if frame is None:
            raise RuntimeError(
                "tpudist.keras.value_and_grad was used outside of replica functions, at "
                f"{line_of_call()}. Use it in a function that strategy.run or tpudist.function "
                "runs. Elsewhere, use jax.value_and_grad of model.stateless_call."
            )
        found = _list(variables)

        def of_values(values, args, kwargs):
            token = _held.set(
                {**_held.get(), **{id(v): x for v, x in zip(found, values, strict=True)}}
            )
            try:
                return fn(*args, **kwargs)
            finally:
                _held.reset(token)

        of_values.__name__ = getattr(fn, "__name__", "loss")
        values = [v.value for v in found]
        result = jax.value_and_grad(of_values, has_aux=has_aux)(values, args, kwargs)
        now = _list(variables)
        if list(map(id, now)) != list(map(id, found)):
            raise frame.interruption()  # what `fn` has built is there then
        if not found:
            raise ValueError(
                f"tpudist.keras.value_and_grad received no variables, at {line_of_call()}. A model "
                "that is built by its first call has none before. Pass the model itself, "
                "value_and_grad(fn, model), or begin the model with keras.Input(shape)."
            )
        return result

    return compute


def _list(variables: Any) -> list[Any]:
    import keras

    given = variables.trainable_variables if isinstance(variables, keras.Layer) else variables
    given = given() if callable(given) else given
    found = list(given) if isinstance(given, Sequence) else [given]
    for x in found:
        if not isinstance(x, keras.Variable):
            raise TypeError(
                f"tpudist.keras.value_and_grad received {type(x).__name__} to differentiate by. "
                "Pass Keras variables: a list such as model.trainable_variables, a model, or a "
                "function that returns them."
            )
    return found
