"""Reads and assigns of Keras variables in functions that a strategy compiles.

Without this, a compiled function would use the value from its trace forever, and an assignment
would store a value of the trace. So a variable that the function reads becomes an input of the
program, passed at each call. A variable that it assigns becomes an output; see
`assigned_variables`.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import keras

from tpudist import context
from tpudist.context.closure_place import current_place
from tpudist.context.frame import Frame
from tpudist.keras import (
    assigned_variables,
    keras_internals,
    loss_reductions,
    optimizer_sums,
    variable_gradients,
)
from tpudist.keras.variable_notes import read_notes, write_notes
from tpudist.xla.traces import is_traced, run_eagerly
from tpudist.xla.user_code import line_of_call

# By the id of the Keras variable. Frames compare captures by identity, so all traces must get the
# same object; it lives as long as one of them has it. It holds its variable, so that no other
# variable gets the id while it is here.
_known: "weakref.WeakValueDictionary[int, CapturedVariable]" = weakref.WeakValueDictionary()
_is_installed = False


class CapturedVariable:
    """A Keras variable that a trace reads as an extra input; see `run.frame.captures.Guest`."""

    def __init__(self, variable: keras.Variable):
        self.name = variable.path
        self._variable = variable

    @property
    def _value(self) -> jax.Array:
        _require_array(self._variable)
        return keras_internals.array_of(self._variable)


def install(problem: str | None = None) -> None:
    """Installs the hooks, once.

    Args:
        problem: Reason why this Keras is not supported, or None. With a reason, a compiled function
            that reads or assigns a variable raises an error.
    """
    global _is_installed
    if _is_installed:
        return
    # `keras_scope` calls this for every scope; a second hook around the first would capture
    # variables twice.
    _is_installed = True
    variable_class: Any = keras.Variable
    plain = variable_class.value
    variable_class.value = property(_make_reader(plain.fget, problem), doc=plain.__doc__)
    wrap = functools.partial(_make_assigner, problem=problem)
    keras_internals.replace_method(variable_class, "assign", wrap)
    if problem is None:
        keras_internals.wrap_creation(_enter_creation)
        optimizer_sums.install()
        loss_reductions.install()


def _make_reader(plain: Callable[..., Any], problem: str | None) -> Callable[..., Any]:
    def value(self):
        frame = context.current().frame
        creator = read_notes(self).frame
        if creator is not None and is_traced(keras_internals.array_of(self)):
            _require_frame(self, creator(), frame)
        # The value by which JAX differentiates comes first: with the input of the frame instead,
        # its gradient would be zero.
        traced = variable_gradients.find_value(self)
        if traced is None and (frame is None or not _is_from_outside(self, frame)):
            if frame is None:
                _protect_from_donation(self)
            return plain(self)
        if problem is not None:
            _refuse(self, "read", problem)
        if traced is None:
            assert frame is not None, "without a frame, the plain value was returned"
            traced = _read(self, frame)
        # A stateless scope, so that Keras converts this value like any other: it casts values in
        # mixed precision.
        scope = keras.StatelessScope(initialize_variables=False)
        scope.add_update((self, traced))
        with scope:
            return plain(self)

    return value


def _make_assigner(plain: Callable[..., Any], problem: str | None) -> Callable[..., Any]:
    def assign(self, value):
        frame = context.current().frame
        if frame is None or keras_internals.is_in_stateless_scope():
            return plain(self, value)
        if variable_gradients.find_value(self) is not None:
            _refuse(self, "assigned", "tpudist.keras.value_and_grad differentiates by it.")
        if is_traced(keras_internals.array_of(self)):  # it was created in this trace
            return plain(self, value)
        _require_array(self)
        _require_support(self, frame, problem)
        # Keras checks and converts the value, but stores it only in the scope.
        scope = keras.StatelessScope(initialize_variables=False)
        with scope:
            plain(self, value)
        new: Any = scope.get_current_value(self)
        return assigned_variables.find_or_make(self, frame).assign_in(frame, new)

    return assign


def _read(variable: keras.Variable, frame: Frame) -> jax.Array:
    assigned = assigned_variables.find(variable, frame)
    if assigned is not None:
        _require_array(variable)
        return assigned.read_in(frame)
    guest: Any = _capture(variable)
    # 0 changes: no function has assigned it, or `assigned` would exist.
    return frame.read_guest(guest, 0)


def _protect_from_donation(variable: keras.Variable) -> None:
    # The caller now has the array, so the next step must not overwrite it in place.
    for assigned in read_notes(variable).assigned.values():
        assigned.strategy._protect_from_donation(assigned)


def _enter_creation(variable: keras.Variable) -> contextlib.AbstractContextManager:
    """Returns the context in which a new variable gets its first value."""
    frame = context.current().frame
    if frame is None or frame.is_eager or keras_internals.is_in_stateless_scope():
        return contextlib.nullcontext()
    write_notes(variable).frame = weakref.ref(frame)
    # The function is traced again after the first trace in which a line creates a variable. The
    # variable may outlive that trace, so its value is computed eagerly. If the line creates one in
    # a later trace too, the value of that one belongs to the trace, like all its other results.
    return run_eagerly() if frame.is_first_to_build(line_of_call()) else contextlib.nullcontext()


def _require_frame(variable: keras.Variable, creator: Frame | None, frame: Frame | None) -> None:
    """Checks that a traced value belongs to this trace, or to the outermost one around it.

    Raises:
        RuntimeError: If it does not.
    """
    if creator is None or frame is None or creator not in (frame, frame.root):
        raise RuntimeError(
            f"The Keras variable '{variable.path}' was made while a replica function was compiled, "
            "so its first value belongs to the compilation and is not an array, but it is read "
            f"after that, at {line_of_call()}. Build models before you call them on replicas: "
            "begin with keras.Input(shape), or call model.build(shape) in the strategy's scope. "
            "Build optimizers with optimizer.build(model.trainable_variables)."
        )


def _require_array(variable: keras.Variable) -> None:
    if keras_internals.array_of(variable) is None:
        raise RuntimeError(
            f"A compiled function uses the Keras variable '{variable.path}', which holds no value "
            "now: while `fit` runs, its steps hold the values. Call the function after `fit`, or "
            "in a callback at the end of an epoch."
        )


def _require_support(variable: keras.Variable, frame: Frame, problem: str | None) -> None:
    """Checks that the value which a function assigns can be written back to the variable."""
    if problem is not None:
        _refuse(variable, "assigned", problem)
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


def _refuse(variable: keras.Variable, action: str, why: str) -> NoReturn:
    strategy = context.current().strategy
    raise RuntimeError(
        f"The Keras variable '{variable.path}' was {action} in a function that {strategy!r} "
        f"compiles, at {line_of_call()}. {why}"
    )


def _is_from_outside(variable: keras.Variable, frame: Frame) -> bool:
    """Returns whether a variable's value comes from outside of a trace, which must capture it."""
    if frame.is_eager or keras_internals.has_stateless_value(variable):
        return False
    array = keras_internals.array_of(variable)
    if array is None:  # in a stateless scope, Keras computes the shape of its first value
        return not keras_internals.is_in_stateless_scope()
    return not is_traced(array)


def _capture(variable: keras.Variable) -> CapturedVariable:
    captured = _known.get(id(variable))
    if captured is None:
        captured = _known[id(variable)] = CapturedVariable(variable)
    return captured
