"""The `repr` of a Variable: what it is, and its value if that can be read."""

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.state.variable_base import VariableBase
from tpudist.state.variable_value import computes_here

# A larger one is not copied to the host only to be printed.
_MAX_SHOWN = 10_000


def describe_variable(variable: VariableBase) -> str:
    """A variable for people: what it is, and what it holds if that can be read."""
    kind = "ON_READ, " if variable.on_read else ""
    shape = ",".join(map(str, variable.shape))
    return (
        f"<tpudist.Variable '{variable.name}' {variable.dtype}[{shape}] "
        f"({kind}aggregation {variable.aggregation.name}) of {variable.strategy!r}"
        f"{_format_value(variable._value, 'components' if variable.on_read else 'value')}>"
    )


def _format_value(value: jax.Array | None, name: str) -> str:
    if value is None or not computes_here() or value.is_deleted() or not hasattr(value, "sharding"):
        return ""
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    within_reach = value.is_fully_addressable or value.is_fully_replicated
    if is_key or not within_reach or value.size > _MAX_SHOWN:
        return ""
    text = np.array2string(np.asarray(value), threshold=8, edgeitems=2, separator=", ")
    return f", {name}={' '.join(text.split())}"
