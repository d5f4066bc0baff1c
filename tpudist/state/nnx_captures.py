"""What Flax says where a function changes or differentiates an NNX object that it captures."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from flax import errors
from jax.core import Tracer

from tpudist.state import nnx_contents
from tpudist.xla import compile_log
from tpudist.xla.hlo.source_lines import line_of_error


@contextlib.contextmanager
def explain_captures(name: str, whole: bool) -> Iterator[None]:
    """Says of a captured object, on which Flax or JAX gave up in the block, to pass it.

    Flax speaks of trace levels, JAX of meshes, and neither of what the function did.

    Args:
        name: What the user calls the function that is traced in the block.
        whole: Whether the function is a `tpudist.function`.

    Raises:
        ValueError: The function changes or differentiates an NNX object that it captures.
    """
    try:
        yield
    except (ValueError, errors.TraceContextError) as error:
        found = _find_captured(error)
        if found is None:
            raise
        raise ValueError(
            f"'{name}' changes or differentiates an NNX object that it captures "
            f"({type(found).__name__}), at {line_of_error(error)}. A captured object is a constant "
            "of the program. Pass the object as an argument; the caller then sees the changes of "
            f"the step: {compile_log.describe_call(name, 'model, optimizer, ...', whole)}."
        ) from error


def _find_captured(error: Exception) -> Any | None:
    """The object that code of Flax had in hand; None if it was made in the trace, or is none."""
    words = str(error)
    if "different trace level" not in words and "should match the mesh of sharding" not in words:
        return None
    traceback, held = error.__traceback__, []
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_globals.get("__name__", "").startswith("flax.nnx"):
            held += frame.f_locals.values()
        traceback = traceback.tb_next
    objects = [x for x in held if isinstance(x, nnx_contents.OBJECT_TYPES)]
    return next((x for x in reversed(objects) if _is_of_before(x)), None)


def _is_of_before(value: Any) -> bool:
    """Whether an object holds arrays that are there, which nothing made in a trace does."""
    leaves = jax.tree.leaves([x for _, x in nnx_contents.contents(value)])
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    return any(not isinstance(x, Tracer) for x in arrays)
