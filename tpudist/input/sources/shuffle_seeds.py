"""Finds the unseeded random generators of a dataset, whose order no other run can draw again.

The search is a help, not a proof: a seed of more than 96 bits looks like no seed, and a generator
may be missed. Only NumPy's are searched, not Python's `random`. If one is missed, the checksum of
the last batch reports the other order when a run resumes.
"""

import dis
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# NumPy draws 128 bits of entropy without a seed. One in 2^32 of these looks like a seed.
_MIN_DRAWN_ENTROPY = 1 << 96
# Functions of the module that use its global generator.
_SHUFFLES = (np.random.shuffle, np.random.permutation, np.random.choice)


def find_unseeded(source: object, iterator: object) -> str | None:
    """Returns the name of an unseeded generator of a user's dataset; None if none is found.

    Args:
        source: The dataset: an iterable, or a function that makes one.
        iterator: The current pass through it.
    """
    functions = [source, _iter_method(source), iterator]
    values = _reachable_values(source, iterator)
    if any(_shuffles(c, values) for f in functions for c in _code_of(f)):
        # The global generator. `np.random.seed` replaces it by one with the seed as its entropy.
        if _has_no_seed(np.random.mtrand._rand):  # type: ignore[attr-defined]
            return "np.random"
    for name, value in values.items():
        if isinstance(value, np.random.Generator | np.random.RandomState) and _has_no_seed(value):
            return name
    return None


def _has_no_seed(generator: np.random.Generator | np.random.RandomState) -> bool:
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
    else:
        bits = generator._bit_generator  # type: ignore[attr-defined]
    # A bit generator that was made from a state has no `seed_seq`.
    entropy = getattr(getattr(bits, "seed_seq", None), "entropy", None)
    return isinstance(entropy, int) and entropy >= _MIN_DRAWN_ENTROPY


def _iter_method(source: object) -> Any:
    return getattr(type(source), "__iter__", None)  # a function that makes a dataset has none


def _function_of(value: object) -> Any:
    return getattr(value, "__func__", value)  # of a method


def _code_of(value: object) -> Iterator[types.CodeType]:
    function = _function_of(value)
    if callable(function):
        function = inspect.unwrap(function)
    for name in ("__code__", "gi_code"):  # of a function, and of a generator or an object like one
        if isinstance(code := getattr(function, name, None), types.CodeType):
            yield code


def _shuffles(code: types.CodeType, values: Mapping[str, object]) -> bool:
    """Whether code reads a function that shuffles with NumPy's global generator."""
    # Follows chains such as `np.random.shuffle`: a name, then attributes of modules.
    value: object = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes = vars(value) if isinstance(value, types.ModuleType) else {}
            value = attributes.get(instruction.argval)
        elif instruction.opname.startswith("LOAD_"):
            value = values.get(instruction.argval)
        else:
            value = None
        if any(value is shuffle for shuffle in _SHUFFLES):
            return True
    return False


def _globals_of(code: types.CodeType, module: Mapping[str, object]) -> dict[str, object]:
    names = (x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL")
    return {name: module.get(name) for name in names}


def _reachable_values(source: object, iterator: object) -> dict[str, object]:
    """Returns the values by name that a dataset can draw from.

    These are attributes, and the variables, closures and defaults that its functions use.
    """
    values: dict[str, object] = {}
    local_values: dict[str, object] = {}
    frame = getattr(iterator, "gi_frame", None)
    if isinstance(frame, types.FrameType):  # not for a generator at its end
        values |= _globals_of(frame.f_code, frame.f_globals)
        local_values = dict(frame.f_locals)
    for function in map(_function_of, (source, _iter_method(source))):
        if isinstance(function, types.FunctionType):
            values |= _globals_of(function.__code__, function.__globals__)
            try:
                values |= inspect.getclosurevars(function).nonlocals
            except ValueError:  # a variable of the closure that has no value yet
                pass
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            defaults = function.__defaults__ or ()
            values |= dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
            values |= function.__kwdefaults__ or {}
    owner = getattr(source, "__self__", None)  # of a method, also of one in C
    for x in (source, iterator, owner, local_values.get("self")):
        # Objects with slots have no `__dict__`; a module has too much in it.
        values |= getattr(x, "__dict__", {}) if not isinstance(x, types.ModuleType) else {}
    return values | local_values


def find_in_stream(examples: object) -> str | None:
    """Returns a name if a Hugging Face stream is shuffled without a seed, else None.

    Args:
        examples: The private examples iterable of the stream.
    """
    generator = getattr(examples, "generator", None)
    if isinstance(generator, np.random.Generator) and _has_no_seed(generator):
        return "shuffle() of the dataset"
    return next(filter(None, map(find_in_stream, inputs_of_stream(examples))), None)


def inputs_of_stream(examples: object) -> list[object]:
    """Returns the examples iterables from which a Hugging Face stream is made."""
    # The attributes of the private classes in `datasets.iterable_dataset`.
    inputs = getattr(examples, "ex_iterables", None) or ()
    return [x for x in (getattr(examples, "ex_iterable", None), *inputs) if x is not None]
