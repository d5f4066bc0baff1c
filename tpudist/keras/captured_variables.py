"""Keras' variables in functions that a strategy compiles, which read and call what is around them.

Such a function would keep for ever what a variable held when it was traced, and what it assigned
would be a value of that trace, of which nothing comes out. So what it reads is an input of the
program, fed anew at each call, and what it assigns is refused, with the line.
"""

import weakref
from typing import Any

import jax
import keras

from tpudist import context
from tpudist.context.frame import Frame
from tpudist.keras import keras_internals
from tpudist.xla.hlo.source_lines import line_of_call
from tpudist.xla.traces import is_traced

_LOOPS = "docs/keras_fit.md, 'Loops of your own'"
_known: "weakref.WeakValueDictionary[int, CapturedVariable]" = weakref.WeakValueDictionary()
_is_installed = False


class CapturedVariable:
    """A variable of Keras, as what a trace reads beside its arguments: see `run.captures.Guest`."""

    def __init__(self, variable: Any):
        """Of `variable`."""
        self.name = variable.path
        self._variable = variable

    @property
    def _value(self) -> jax.Array:
        value = keras_internals.array_of(self._variable)
        if value is None:
            raise RuntimeError(
                f"A compiled function reads the Keras variable '{self.name}', which holds nothing "
                f"now: while `fit` runs, its steps have the values. Call the function after `fit`, "
                f"or in a callback at the end of an epoch."
            )
        return value


def install(reason: str | None = None) -> None:
    """Puts the hooks in place; once.

    Args:
        reason: Why this Keras is not supported, if it is not: then reads are refused as well.
    """
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    variable_class: Any = keras.Variable
    plain_value, plain_assign = variable_class.value, variable_class.assign

    def value(self):
        frame = context.current().frame
        made_in = getattr(self, "tpudist_frame", None)
        if made_in is not None and is_traced(keras_internals.array_of(self)):
            _require_frame(self, made_in(), frame)
        if frame is None or not _is_from_outside(self, frame):
            return plain_value.fget(self)
        if reason is not None:
            raise RuntimeError(
                f"The Keras variable '{self.path}' was read in a function that "
                f"{frame.strategy!r} compiles, at {line_of_call()}. {reason}"
            )
        # Keras makes of what its scope says what it makes of any value: casts, in mixed precision.
        scope = keras.StatelessScope(initialize_variables=False)
        guest: Any = _capture(self)
        scope.add_update((self, frame.read_guest(guest, 0)))
        with scope:
            return plain_value.fget(self)

    def assign(self, value):
        frame = context.current().frame
        if frame is not None and _is_real(self) and not keras_internals.is_in_stateless_scope():
            raise RuntimeError(
                f"The Keras variable '{self.path}' was assigned in a function that "
                f"{frame.strategy!r} compiles, at {line_of_call()}. Such a function reads Keras' "
                f"variables and changes none: what a model in training, an optimizer or a metric "
                f"would change is passed to it as arrays, and returned. Use stateless_call, "
                f"stateless_apply and stateless_update_state ({_LOOPS}), or train with `fit` in "
                f"the strategy's scope."
            )
        return plain_assign(self, value)

    variable_class.value = property(value, doc=plain_value.__doc__)
    variable_class.assign = assign
    keras_internals.call_on_creation(_note_frame)


def _note_frame(variable: Any) -> None:
    frame = context.current().frame
    if frame is not None and not frame.is_eager:
        variable.tpudist_frame = weakref.ref(frame)


def _require_frame(variable: Any, made_in: Frame | None, frame: Frame | None) -> None:
    """Refuses a variable that another trace has made.

    Raises:
        RuntimeError: It is one.
    """
    if made_in is None or made_in is not frame:
        raise RuntimeError(
            f"The Keras variable '{variable.path}' was made while a replica function was compiled, "
            f"where its first value is one of the compilation's and not an array, and is read "
            f"after that, at {line_of_call()}. Build models before they are called on replicas: "
            f"begin with keras.Input(shape), or call model.build(shape) in the strategy's scope; "
            f"optimizers with optimizer.build(model.trainable_variables)."
        )


def _is_from_outside(variable: Any, frame: Frame) -> bool:
    """Whether a trace reads a variable of which it has no value yet."""
    if frame.is_eager or keras_internals.is_in_stateless_scope(variable):
        return False
    if keras_internals.array_of(variable) is None:  # what it would be gives shapes, in such a scope
        return not keras_internals.is_in_stateless_scope()
    return _is_real(variable)


def _is_real(variable: Any) -> bool:
    """Whether it holds an array, and not a value of the trace that has made it."""
    held = keras_internals.array_of(variable)
    return held is not None and not is_traced(held)


def _capture(variable: Any) -> CapturedVariable:
    """The same one for all traces, as long as one of them has it."""
    found = _known.get(id(variable))
    if found is None:
        found = _known[id(variable)] = CapturedVariable(variable)
    return found
