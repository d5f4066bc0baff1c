"""The `repr` of a Variable: its properties, and its value if that can be read cheaply."""

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.state.variable_base import VariableBase
from tpudist.state.variable_value import computes_here

# A value with more elements is not copied to the host only to be printed.
_MAX_SIZE = 10_000


def describe_variable(variable: VariableBase) -> str:
    """Returns the text of `repr(variable)`."""
    kind = "ON_READ, " if variable.on_read else ""
    shape = ",".join(map(str, variable.shape))
    return (
        f"<tpudist.Variable '{variable.name}' {variable.dtype}[{shape}] "
        f"({kind}aggregation {variable.aggregation.name}) of {variable.strategy!r}"
        f"{_format_value(variable._value, 'components' if variable.on_read else 'value')}>"
    )


def _format_value(value: jax.Array | jax.ShapeDtypeStruct | None, name: str) -> str:
    # `repr` must never raise or communicate: it appears in error messages and in debuggers.
    if not isinstance(value, jax.Array) or not computes_here() or value.is_deleted():
        return ""
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    is_available = value.is_fully_addressable or value.is_fully_replicated
    if is_key or not is_available or value.size > _MAX_SIZE:
        return ""
    text = np.array2string(np.asarray(value), threshold=8, edgeitems=2, separator=", ")
    return f", {name}={' '.join(text.split())}"
