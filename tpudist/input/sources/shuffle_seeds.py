"""Finds random generators of a dataset that have no seed, so that no run draws the order again.

A generator that is found is unseeded for certain. If one is not found, the checksum of the last
batch differs when a run is resumed.
"""

import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

# NumPy draws 128 bits where no seed is given, and users give fewer.
_MIN_DRAWN_ENTROPY = 1 << 96
_SHUFFLES = {"shuffle", "permutation", "permuted", "choice"}


def find(source: Any, iterator: Any) -> str | None:
    """Returns the name of an unseeded generator of a user's dataset; None if none is found.

    Args:
        source: The dataset: an iterable, or a function that makes one.
        iterator: The current pass through it.
    """
    functions = [source, getattr(type(source), "__iter__", None), iterator]
    code = [c for f in functions for c in _code_of(f)]
    if any("random" in c.co_names and _SHUFFLES & {*c.co_names} for c in code):
        # The module's own generator, which np.random.seed gives another one.
        if _has_no_seed(np.random.mtrand._rand):  # type: ignore[attr-defined]
            return "np.random"
    for name, value in _values_of(source, iterator):
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


def _values_of(source: Any, iterator: Any) -> Iterable[tuple[str, Any]]:
    """Names and values that a dataset can draw from: attributes, and what its functions see."""
    found: dict[str, Any] = {}
    frame = getattr(iterator, "gi_frame", None)
    within = dict(frame.f_locals) if frame is not None else {}
    for function in (source, getattr(type(source), "__iter__", None)):
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType):
            found |= {n: function.__globals__.get(n) for n in function.__code__.co_names}
            try:
                found |= inspect.getclosurevars(function).nonlocals
            except ValueError:  # a cell that is not filled yet
                pass
            found |= {f"default {i}": x for i, x in enumerate(function.__defaults__ or ())}
    owners = (source, iterator, getattr(source, "__self__", None), within.get("self"))
    for owner in owners:
        found |= getattr(owner, "__dict__", {}) if not isinstance(owner, types.ModuleType) else {}
    return {**found, **within}.items()


def find_in_stream(dataset: Any) -> str | None:
    """Does the same for the examples iterable of a stream of Hugging Face."""
    if _generator_has_no_seed(dataset):
        return "shuffle() of the dataset"
    below = [getattr(dataset, "ex_iterable", None), *(getattr(dataset, "ex_iterables", None) or ())]
    return next(filter(None, (find_in_stream(each) for each in below if each is not None)), None)


def _generator_has_no_seed(dataset: Any) -> bool:
    generator = getattr(dataset, "generator", None)
    return isinstance(generator, np.random.Generator) and _has_no_seed(generator)
