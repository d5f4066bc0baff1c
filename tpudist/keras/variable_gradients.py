"""Gradients with respect to Keras variables: `value_and_grad`.

While `fn` runs, each variable has a traced value, which `captured_variables` reads from here.
"""

import contextlib
import contextvars
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from tpudist import context
from tpudist.keras import keras_internals
from tpudist.xla.user_code import line_of_call

if TYPE_CHECKING:
    import keras

_NO_VALUES: Mapping[int, jax.Array] = types.MappingProxyType({})
# The traced values of the variables by which JAX differentiates now, by the variables' ids.
_values: contextvars.ContextVar[Mapping[int, jax.Array]] = contextvars.ContextVar(
    "values", default=_NO_VALUES
)


def find_value(variable: "keras.Variable") -> jax.Array | None:
    """Returns the value of a variable by which JAX differentiates now; else None.

    Also None if a stateless call determines the value.
    """
    value = _values.get().get(id(variable))
    return value if value is None or not keras_internals.has_stateless_value(variable) else None


def is_differentiating() -> bool:
    """Returns whether `value_and_grad` is differentiating a function."""
    return bool(_values.get())


def value_and_grad(
    fn: Callable[..., Any],
    variables: "Sequence[keras.Variable] | keras.Layer | Callable[[], Sequence[keras.Variable]]",
    *,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes `fn` and its gradients with respect to Keras variables.

    For replica functions, instead of `tf.GradientTape`. `fn` computes the loss with the model
    itself, and its assignments (statistics of batches, seeds, metrics) have effect.

    Args:
        fn: Called once, with the arguments of the result; returns a floating scalar, the loss of
            the replica's examples. With `has_aux`, it returns a pair of the loss and any value.
        variables: Sequence of Keras variables; a layer or model, for its trainable variables; or a
            function without arguments that returns them. The function is called again after `fn`,
            for models that are built by their first call.
        has_aux: Whether `fn` returns a pair.

    Returns:
        A function with the arguments of `fn`. It returns a pair: the result of `fn`, and a list
        with one gradient for each variable, of its shape and dtype. They are the gradients of this
        replica's loss; Keras' optimizers sum them over the replicas.

    Raises:
        RuntimeError: If called outside of replica functions, where assignments of `fn` would store
            values of JAX's trace.
        TypeError: If `variables` contains other objects.
        ValueError: If there are no variables.
    """

    def compute(*args, **kwargs):
        frame = context.current().frame
        if frame is None:
            raise RuntimeError(
                "tpudist.keras.value_and_grad was used outside of replica functions, at "
                f"{line_of_call()}. Use it in a function that strategy.run or tpudist.function "
                "runs. Elsewhere, use jax.value_and_grad of model.stateless_call."
            )
        # Before `fn`: JAX needs the values by which it differentiates as arguments.
        before = _variables_of(variables)
        result = _differentiate(fn, before, has_aux, args, kwargs)
        if list(map(id, _variables_of(variables))) != list(map(id, before)):
            # `fn` has built the model, so some gradients are missing. The next trace of the
            # function starts with the built model.
            raise frame.interruption()
        _require_variables(before)
        return result

    return compute


def _differentiate(
    fn: Callable[..., Any],
    variables: Sequence["keras.Variable"],
    has_aux: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    def of_values(values, args, kwargs):
        with _use_values(variables, values):
            return fn(*args, **kwargs)

    # JAX shows this name in its errors and in profiles. The user's callable may have none.
    of_values.__name__ = getattr(fn, "__name__", "loss")
    values = [v.value for v in variables]
    return jax.value_and_grad(of_values, has_aux=has_aux)(values, args, kwargs)


def _require_variables(variables: Sequence["keras.Variable"]) -> None:
    if not variables:
        raise ValueError(
            f"tpudist.keras.value_and_grad received no variables, at {line_of_call()}. A model "
            "that is built by its first call has none before. Pass the model itself, "
            "value_and_grad(fn, model), or begin the model with keras.Input(shape)."
        )


@contextlib.contextmanager
def _use_values(
    variables: Sequence["keras.Variable"], values: Sequence[jax.Array]
) -> Iterator[None]:
    new = {id(v): x for v, x in zip(variables, values, strict=True)}
    token = _values.set({**_values.get(), **new})
    try:
        yield
    finally:
        _values.reset(token)


def _variables_of(variables: Any) -> list["keras.Variable"]:
    import keras

    if isinstance(variables, keras.Layer):
        variables = variables.trainable_variables
    elif callable(variables):
        variables = variables()
    result = list(variables) if isinstance(variables, Sequence) else [variables]
    for x in result:
        if not isinstance(x, keras.Variable):
            raise TypeError(
                f"tpudist.keras.value_and_grad received {type(x).__name__} to differentiate by. "
                "Pass Keras variables: a list such as model.trainable_variables, a model, or a "
                "function that returns them."
            )
    return result
