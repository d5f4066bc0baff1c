"""Explains the errors of JAX about a traced value that Python code needs now.

A replica function is traced once for all replicas, so the values of its arrays are not known while
it runs in Python. JAX's errors say that in terms of `jax.jit`. Here they name the function, the
line, and what to write instead. They keep their class, and JAX's text behind ours.
"""

import contextlib
from collections.abc import Iterator

import jax

from tpudist.xla.hlo.source_lines import line_of_error

_NUMBER = (
    "needs the value of an array as a Python number (`float`, `int`, `.item()`, a shape)",
    "Compute with the array itself, and convert the result of strategy.run. Lengths and shapes "
    "must be Python numbers or come from x.shape.",
)
_TRACED = "A replica function is traced once for all replicas, before its values are known."
# The errors of JAX, the narrower ones first: what the line does, and what to write instead.
_USES: dict[type[Exception], tuple[str, str]] = {
    jax.errors.TracerBoolConversionError: (
        "uses an array as a Python condition (`if`, `while`, `and`, `or`, `not`, `assert`)",
        "Choose between values with jnp.where, between computations with jax.lax.cond, and repeat "
        "with jax.lax.while_loop.",
    ),
    jax.errors.TracerArrayConversionError: (
        "passes an array to NumPy or to another library",
        "Use the function of jax.numpy, or call the library with jax.pure_callback.",
    ),
    jax.errors.TracerIntegerConversionError: (
        "uses an array as a Python integer (`range`, an index of a list)",
        "Loop with jax.lax.fori_loop, and select with jnp.take.",
    ),
    jax.errors.NonConcreteBooleanIndexError: (
        "selects with a mask, so that the shape of the result depends on values",
        "Keep the shape: jnp.where(mask, x, 0).",
    ),
    jax.errors.ConcretizationTypeError: _NUMBER,
}
# Other TypeErrors of JAX, NumPy and Python over a traced value, by a phrase of their text.
_PHRASES: dict[str, tuple[str, str]] = {
    "Shapes must be 1D sequences of concrete values": _NUMBER,
    "converted to a scalar index": _USES[jax.errors.TracerIntegerConversionError],
    "Tracer.__format__": ("formats an array as text", "Print with jax.debug.print('{:.2f}', x)."),
}


@contextlib.contextmanager
def explain_values(name: str) -> Iterator[None]:
    """Puts an explanation before JAX's text if the block needs the value of a traced array.

    Args:
        name: What the user calls the function that is traced.
    """
    try:
        yield
    except (TypeError, IndexError) as error:
        text = str(error)
        use = next((use for kind, use in _USES.items() if isinstance(error, kind)), None)
        use = use or next((use for phrase, use in _PHRASES.items() if phrase in text), None)
        if use is not None and _TRACED not in text:  # a trace inside of this one explains it, too
            what, instead = use
            error.args = (
                f"'{name}' ({line_of_error(error)}) {what}. {_TRACED} {instead} To look at values, "
                f"call it in `with strategy.debug():`, where it runs as plain Python.\n{text}",
            )
        raise
