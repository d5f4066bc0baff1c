"""Keras' variables in functions that a strategy compiles, which read and call what is around them.

Such a function would keep for ever what a variable held when it was traced, and what it assigned
would be a value of that trace. So what it reads is an input of the program, fed anew at each call,
and what it assigns is an output, which the variable holds afterwards: see `assigned_variables`.
"""

import contextlib
import weakref
from typing import Any

import jax
import keras

from tpudist import context
from tpudist.context.closure_place import current_place
from tpudist.context.frame import Frame
from tpudist.keras import (
    assigned_variables,
    held_variables,
    keras_internals,
    loss_reductions,
    optimizer_sums,
)
from tpudist.xla.hlo.source_lines import line_of_call
from tpudist.xla.traces import is_traced, run_eagerly

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
        _require_array(self._variable)
        return keras_internals.array_of(self._variable)


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
        held = held_variables.find(self)
        if held is None and (frame is None or not _is_from_outside(self, frame)):
            _note_reader(self, frame)
            return plain_value.fget(self)
        if reason is not None:
            _refuse(self, "read", reason)
        if held is None:
            assert frame is not None, "it is from outside of one"
            held = _read(self, frame)
        # Keras makes of what its scope says what it makes of any value: casts, in mixed precision.
        scope = keras.StatelessScope(initialize_variables=False)
        scope.add_update((self, held))
        with scope:
            return plain_value.fget(self)

    def assign(self, value):
        frame = context.current().frame
        if frame is None or keras_internals.is_in_stateless_scope():
            return plain_assign(self, value)
        if held_variables.find(self) is not None:
            _refuse(self, "assigned", "tpudist.keras.value_and_grad differentiates by it.")
        if not is_traced(keras_internals.array_of(self)):  # else it was made in this trace
            _require_array(self)
            _require_support(self, frame, reason)
            scope = keras.StatelessScope(initialize_variables=False)
            with scope:
                plain_assign(self, value)  # of its shape and dtype, or refused
            new: Any = scope.get_current_value(self)
            return assigned_variables.find_or_make(self, frame).assign_in(frame, new)
        return plain_assign(self, value)

    variable_class.value = property(value, doc=plain_value.__doc__)
    variable_class.assign = assign
    if reason is None:
        keras_internals.wrap_creation(_create)
        optimizer_sums.install()
        loss_reductions.install()


def _read(variable: Any, frame: Frame) -> jax.Array:
    assigned = assigned_variables.find(variable, frame)
    if assigned is not None:
        _require_array(variable)
        return assigned.read_in(frame)
    guest: Any = _capture(variable)
    return frame.read_guest(guest, 0)


def _note_reader(variable: Any, frame: Frame | None) -> None:
    """Has the next step leave alone the array that somebody has now."""
    if frame is None:
        for assigned in getattr(variable, "tpudist_assigned", {}).values():
            assigned.strategy._protect_from_donation(assigned)


def _create(variable: Any) -> contextlib.AbstractContextManager:
    """Where a variable is made in a trace: it outlives the trace, with a value of its own.

    But a function that makes one in each trace again makes a layer for itself, whose variables are
    values of the trace, as all that it computes.
    """
    frame = context.current().frame
    if frame is None or frame.is_eager or keras_internals.is_in_stateless_scope():
        return contextlib.nullcontext()
    variable.tpudist_frame = weakref.ref(frame)
    return run_eagerly() if frame.makes_once(line_of_call()) else contextlib.nullcontext()


def _require_frame(variable: Any, made_in: Frame | None, frame: Frame | None) -> None:
    """Refuses a value that another trace has made: not this one, nor the outermost around it.

    Raises:
        RuntimeError: It is one.
    """
    if made_in is None or frame is None or made_in not in (frame, frame.root):
        raise RuntimeError(
            f"The Keras variable '{variable.path}' was made while a replica function was compiled, "
            "so its first value belongs to the compilation and is not an array, but it is read "
            f"after that, at {line_of_call()}. Build models before you call them on replicas: "
            "begin with keras.Input(shape), or call model.build(shape) in the strategy's scope. "
            "Build optimizers with optimizer.build(model.trainable_variables)."
        )


def _require_array(variable: Any) -> None:
    if keras_internals.array_of(variable) is None:
        raise RuntimeError(
            f"A compiled function uses the Keras variable '{variable.path}', which holds no value "
            "now: while `fit` runs, its steps hold the values. Call the function after `fit`, or "
            "in a callback at the end of an epoch."
        )


def _require_support(variable: Any, frame: Frame, reason: str | None) -> None:
    """Refuses to assign where nothing takes what comes out to the variable."""
    if reason is not None:
        _refuse(variable, "assigned", reason)
    if frame.is_eager:
        _refuse(
            variable,
            "assigned",
            "While functions run eagerly, one replica after the other, they cannot change Keras "
            "variables. Use tpudist.run_functions_eagerly(False), or remove strategy.debug().",
        )
    if current_place() is not None:
        _refuse(
            variable,
            "assigned",
            "A coordinator has scheduled the function, and workers would change the variable "
            "independently. Pass the values, and return them: stateless_call, stateless_apply and "
            "stateless_update_state.",
        )


def _refuse(variable: Any, what: str, why: str) -> None:
    strategy = context.current().strategy
    raise RuntimeError(
        f"The Keras variable '{variable.path}' was {what} in a function that {strategy!r} "
        f"compiles, at {line_of_call()}. {why}"
    )


def _is_from_outside(variable: Any, frame: Frame) -> bool:
    """Whether a trace reads a variable of which it has no value yet."""
    if frame.is_eager or keras_internals.is_in_stateless_scope(variable):
        return False
    held = keras_internals.array_of(variable)
    if held is None:  # what it would be gives shapes, in such a scope
        return not keras_internals.is_in_stateless_scope()
    return not is_traced(held)


def _capture(variable: Any) -> CapturedVariable:
    """The same one for all traces, as long as one of them has it."""
    found = _known.get(id(variable))
    if found is None:
        found = _known[id(variable)] = CapturedVariable(variable)
    return found
