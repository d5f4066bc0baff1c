"""Finds random generators of a dataset that have no seed, so that no run draws the order again.

A generator that is found is unseeded, or has a seed of more than 96 bits, which looks the same. If
one is not found, the checksum of the last batch differs when a run is resumed.
"""

import dis
import inspect
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

# NumPy draws 128 bits where no seed is given.
_MIN_DRAWN_ENTROPY = 1 << 96
# The methods of NumPy's own generator, as its module offers them.
_SHUFFLES = (np.random.shuffle, np.random.permutation, np.random.choice)


def find(source: Any, iterator: Any) -> str | None:
    """Returns the name of an unseeded generator of a user's dataset; None if none is found.

    Args:
        source: The dataset: an iterable, or a function that makes one.
        iterator: The current pass through it.
    """
    functions = [source, getattr(type(source), "__iter__", None), iterator]
    values = _values_of(source, iterator)
    if any(_shuffles(c, values) for f in functions for c in _code_of(f)):
        # The module's own generator, which np.random.seed gives another one.
        if _has_no_seed(np.random.mtrand._rand):  # type: ignore[attr-defined]
            return "np.random"
    for name, value in values.items():
        if isinstance(value, np.random.Generator | np.random.RandomState) and _has_no_seed(value):
            return name
    return None


def _has_no_seed(generator: Any) -> bool:
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator
    entropy = getattr(getattr(bits, "seed_seq", None), "entropy", None)
    return isinstance(entropy, int) and entropy >= _MIN_DRAWN_ENTROPY


def _code_of(function: Any) -> Iterator[types.CodeType]:
    function = inspect.unwrap(getattr(function, "__func__", function))
    for name in ("__code__", "gi_code"):
        if isinstance(code := getattr(function, name, None), types.CodeType):
            yield code


def _shuffles(code: types.CodeType, values: dict[str, Any]) -> bool:
    """Whether code reads a function that shuffles by NumPy's own generator."""
    found: Any = None
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            inside = vars(found) if isinstance(found, types.ModuleType) else {}
            found = inside.get(each.argval)
        else:
            found = values.get(each.argval) if each.opname.startswith("LOAD_") else None
        if any(found is shuffle for shuffle in _SHUFFLES):
            return True
    return False


def _globals_of(code: types.CodeType, module: dict[str, Any]) -> dict[str, Any]:
    read = (x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL")
    return {name: module.get(name) for name in read}


def _values_of(source: Any, iterator: Any) -> dict[str, Any]:
    """Names and values that a dataset can draw from: attributes, and what its functions see."""
    found: dict[str, Any] = {}
    frame = getattr(iterator, "gi_frame", None)
    within: dict[str, Any] = {}
    if frame is not None:
        found |= _globals_of(frame.f_code, frame.f_globals)
        within = dict(frame.f_locals)
    for function in (source, getattr(type(source), "__iter__", None)):
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType):
            found |= _globals_of(function.__code__, function.__globals__)
            try:
                found |= inspect.getclosurevars(function).nonlocals
            except ValueError:  # a cell that is not filled yet
                pass
            found |= {f"default {i}": x for i, x in enumerate(function.__defaults__ or ())}
    owners = (source, iterator, getattr(source, "__self__", None), within.get("self"))
    for owner in owners:
        found |= getattr(owner, "__dict__", {}) if not isinstance(owner, types.ModuleType) else {}
    return found | within


def find_in_stream(dataset: Any) -> str | None:
    """Does the same for the examples iterable of a stream of Hugging Face."""
    if _generator_has_no_seed(dataset):
        return "shuffle() of the dataset"
    below = [getattr(dataset, "ex_iterable", None), *(getattr(dataset, "ex_iterables", None) or ())]
    return next(filter(None, (find_in_stream(each) for each in below if each is not None)), None)


def _generator_has_no_seed(dataset: Any) -> bool:
    generator = getattr(dataset, "generator", None)
    return isinstance(generator, np.random.Generator) and _has_no_seed(generator)
