"""Warns of arguments that have no effect or are deprecated, and shortens values in messages."""

import warnings

_MAX_REPR = 120  # characters


def warn_if_given(call: str, value: object, why: str) -> None:
    """Warns, if `value` is not None, that an argument of `tf.distribute` has no effect.

    Args:
        call: Start of the call with the parameter, such as `Checkpoint.save(options`.
        value: Value of the parameter.
        why: Reason, for the warning.
    """
    if value is not None:
        warnings.warn(f"{call}={shorten(value)}) has no effect: {why}.", stacklevel=3)


def warn_of_deprecation(name: str, instead: str, *, stacklevel: int = 3) -> None:
    """Warns that `name` is deprecated, at the line that uses it, and says what to do `instead`."""
    warnings.warn(f"{name} is deprecated: {instead}.", DeprecationWarning, stacklevel=stacklevel)


def warn_of_op_arguments(method: str, use_locking: bool, name: str | None) -> None:
    """Warns that a method ignores arguments that describe a TensorFlow graph operation."""
    if use_locking:
        warnings.warn(
            f"{method}(use_locking={use_locking!r}) has no effect: steps run one at a time.",
            stacklevel=3,
        )
    if name is not None:
        warnings.warn(
            f"{method}(name={name!r}) has no effect: tpudist does not name operations.",
            stacklevel=3,
        )


def shorten(value: object) -> str:
    """Returns the `repr` of a value for a message, or only its type if the `repr` is long."""
    text = repr(value)
    return text if len(text) <= _MAX_REPR and "\n" not in text else f"<{type(value).__name__}>"
