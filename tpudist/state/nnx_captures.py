"""Explains Flax's and JAX's errors about a captured NNX object that a function changes."""

import contextlib
from collections.abc import Iterator

import jax
from flax import errors
from jax.core import Tracer

from tpudist.state import nnx_contents
from tpudist.xla import descriptions
from tpudist.xla.user_code import line_of_error

# Of Flax's check of trace levels, and of JAX's check of an array that was made under another mesh.
_MESSAGES = ("different trace level", "should match the mesh of sharding")


@contextlib.contextmanager
def explain_captures(name: str, whole: bool) -> Iterator[None]:
    """Replaces an error about a captured NNX object by advice to pass it as an argument.

    Flax's message is about trace levels and JAX's about meshes. Neither names the cause: the
    function changes or differentiates an object that it captures.

    Args:
        name: Name of the function that is traced in the block, for the message.
        whole: Whether the function is a `tpudist.function`.

    Raises:
        ValueError: If the function changes or differentiates an NNX object that it captures.
    """
    try:
        yield
    except (ValueError, errors.TraceContextError) as error:
        captured = _find_captured(error)
        if captured is None:
            raise
        raise ValueError(
            f"'{name}' changes or differentiates an NNX object that it captures "
            f"({type(captured).__name__}), at {line_of_error(error)}. A captured object is a "
            "constant of the program. Pass the object as an argument; the caller then sees the "
            "changes of the step: "
            f"{descriptions.describe_call(name, 'model, optimizer, ...', whole)}."
        ) from error


def _find_captured(error: Exception) -> nnx_contents.Object | None:
    """Returns the captured object that Flax was working on; None if there is none.

    The exception has no reference to the object, so it is looked for in the local variables of
    Flax's functions on the traceback, the innermost first.
    """
    if not any(text in str(error) for text in _MESSAGES):
        return None
    traceback, local_values = error.__traceback__, []
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_globals.get("__name__", "").startswith("flax.nnx"):
            local_values += frame.f_locals.values()
        traceback = traceback.tb_next
    objects = [x for x in local_values if isinstance(x, nnx_contents.OBJECT_TYPES)]
    return next((x for x in reversed(objects) if _has_concrete_arrays(x)), None)


def _has_concrete_arrays(value: nnx_contents.Object) -> bool:
    """Whether an object was made before the trace: objects made in it contain only tracers."""
    leaves = jax.tree.leaves([x for _, x in nnx_contents.public_contents(value)])
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    return any(not isinstance(x, Tracer) for x in arrays)
