"""Results as JSON has them, so that those of TensorFlow and of tpudist can be compared."""

import enum
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# The first that fits. TensorFlow has errors of its own for what Python calls a ValueError.
ERRORS = {
    "NotImplementedError": "not implemented",
    "UnimplementedError": "not implemented",
    "StopIteration": "end",
    "OutOfRangeError": "end",
    "CancelledError": "cancelled",
    "InvalidArgumentError": "value",
    "ValueError": "value",
    "TypeError": "type",
    "AttributeError": "attribute",
    "AssertionError": "assertion",
    "LookupError": "lookup",
    "RuntimeError": "runtime",
    "InternalError": "runtime",
}


def error(exception: BaseException) -> dict[str, str]:
    """The kind of an exception."""
    names = {cls.__name__ for cls in type(exception).__mro__}
    found = [kind for name, kind in ERRORS.items() if name in names]
    return {"error": found[0] if found else type(exception).__name__}


def plain(value: Any, unwrap: Callable[[Any], Any] = lambda x: x) -> Any:
    """Converts `value` to numbers, strings, lists and dicts.

    Args:
        value: Nests of arrays, variables, enums, numbers.
        unwrap: Called with objects of the library; returns arrays.
    """
    value = unwrap(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(k): plain(v, unwrap) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, unwrap) for v in value]
    if isinstance(value, float):
        # Six digits: what float32 holds, and short to read.
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biufSU":
            raise TypeError(f"An array of {value.dtype} cannot be the result of a case.")
        return plain(value.tolist(), unwrap)
    raise TypeError(f"{type(value).__name__} cannot be the result of a case: {value!r}")


def same(a: Any, b: Any, rel_tol: float = 1e-5, abs_tol: float = 1e-6) -> bool:
    """Whether two plain results are equal, numbers to what float32 leaves of them."""
    close = functools.partial(same, rel_tol=rel_tol, abs_tol=abs_tol)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=rel_tol, abs_tol=abs_tol)
    return type(a) is type(b) and a == b
