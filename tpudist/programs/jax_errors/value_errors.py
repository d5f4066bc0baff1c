"""Explains JAX's errors about Python code that needs the value of a traced array.

A replica function is traced once for all replicas, so the values of its arrays are not known while
it runs in Python. JAX's errors speak of `jax.jit`. The explanation names the function, the line,
and what to write instead. The error keeps its class, and JAX's text after ours.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import jax

from tpudist.xla.user_code import line_of_error

_NUMBER = (
    "needs the value of an array as a Python number (`float`, `int`, `.item()`, a shape)",
    "Compute with the array itself, and convert the result of strategy.run. Lengths and shapes "
    "must be Python numbers or come from x.shape.",
)
# Name of an input of the function that `run` traces.
_FLAT_INPUT = re.compile(r"(?<=of the argument )local\[(\d+)\]")
_TRACED = "A replica function is traced once for all replicas, before its values are known."
# For each error of JAX, what the line does and what to write instead. Subclasses come first.
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
        name: Name of the traced function.
    """
    try:
        yield
    except (TypeError, IndexError) as error:
        text = str(error)
        use = next((use for kind, use in _USES.items() if isinstance(error, kind)), None)
        use = use or next((use for phrase, use in _PHRASES.items() if phrase in text), None)
        if use is not None and _TRACED not in text:  # an inner trace may have explained it
            problem, remedy = use
            error.args = (
                f"'{name}' ({line_of_error(error)}) {problem}. {_TRACED} {remedy} To look at "
                "values, call it in `with strategy.debug():`, where it runs as plain Python.\n"
                f"{text}",
            )
        raise


@contextlib.contextmanager
def name_inputs(find_names: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Names the user's argument in an error about the value of a traced array.

    JAX names an input of the function that it traces, which may be ours and has flat inputs.

    Args:
        find_names: Returns the names of the flat inputs.
    """
    try:
        yield
    except (TypeError, IndexError) as error:
        error.args = (rename_inputs(str(error), _FLAT_INPUT, find_names), *error.args[1:])
        raise


def rename_inputs(
    text: str, pattern: re.Pattern[str], find_names: Callable[[], Sequence[str]]
) -> str:
    """Returns a text of JAX with the names of inputs.

    Args:
        text: Text of the error.
        pattern: Matches the name of an input of JAX; its first group is the number of the input.
        find_names: Returns the names of the inputs.
    """
    if not pattern.search(text):
        return text
    names = find_names()

    def name(match: re.Match[str]) -> str:
        i = int(match[1])
        return names[i] if i < len(names) and names[i] else match[0]

    # JAX also names our function around that of the user, and its line.
    return re.sub(r"the function flat at \S+ ", "the function ", pattern.sub(name, text))
