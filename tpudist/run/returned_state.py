"""State that a replica function takes as an argument and gives back, as `jax.jit` users write it.

The new state is to lie where the old one lay: left to itself XLA splits a result as it likes, and
the next call, which gets it as an argument, would compile another program.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from tpudist.run.inputs import Inputs
from tpudist.run.results import CallOutputs

# How deep in a result the state is looked for: in `{"train": (state, ema)}`, for one.
_DEPTH = 3


def find_returned_state(
    found: CallOutputs, structure: Sequence[Any], inputs: Inputs, closed: Any, num_variables: int
) -> dict[int, int]:
    """For each output that is a new part of an argument: the number of the flat input it replaces.

    That is so for a part of the result that is nested as a whole argument is, with arrays of the
    same shapes and dtypes. Inputs are counted after the Variables.

    Args:
        found: What the call gave.
        structure: How each argument is nested.
        inputs: The flat inputs.
        closed: The jaxpr of the call.
        num_variables: How many Variables are the first inputs.
    """
    fed: dict[int, list[int]] = {}
    for k, leaf in enumerate(inputs.leaves_of_arguments, inputs.num_nnx):
        if not inputs.stacked[k]:  # what is one for each replica may stay so
            fed.setdefault(leaf, []).append(k)
    sources, results = closed.in_avals[num_variables:], closed.out_avals
    arguments, first = [], 0
    for treedef in structure:
        arguments.append((treedef, first))
        first += treedef.num_leaves
    returned: dict[int, int] = {}
    taken: set[int] = set()
    for part, start in _parts(found.treedef, 0, _DEPTH):
        for treedef, first in arguments:
            if part != treedef or first in taken or start in taken:
                continue
            pairs = _pairs(found, range(start, start + part.num_leaves), first, fed)
            if pairs and all(_are_alike(results[i], sources[k]) for i, k in pairs.items()):
                taken.add(first)
                returned |= {i: k for i, k in pairs.items() if i not in returned}
                break
    return returned


def _parts(treedef: Any, start: int, depth: int) -> Iterator[tuple[Any, int]]:
    """The parts of a structure, outer ones first, each with the number of its first leaf."""
    if not treedef.num_leaves:
        return
    yield treedef, start
    if depth:
        for child in treedef.children():
            yield from _parts(child, start, depth - 1)
            start += child.num_leaves


def _pairs(
    found: CallOutputs, leaves: range, first: int, fed: Mapping[int, Sequence[int]]
) -> dict[int, int]:
    """The arrays among some leaves of the result, with the inputs in the same places."""
    pairs: dict[int, int] = {}
    for offset, leaf in enumerate(leaves):
        kind, what = found.result[leaf]
        if kind == "array" and len(fed.get(first + offset, ())) == 1:
            pairs[what] = fed[first + offset][0]
    return pairs


def _are_alike(result: Any, source: Any) -> bool:
    return result.shape == source.shape and result.dtype == source.dtype


def keep_places(
    outputs: Sequence[jax.Array], returned: Mapping[int, int], places: Sequence[Any]
) -> list[jax.Array]:
    """The outputs, those that are returned state split as what they replace.

    Args:
        outputs: The traced global outputs.
        returned: See `find_returned_state`.
        places: The sharding of each flat input after the Variables, None where it is not known.
    """
    kept = list(outputs)
    for i, k in returned.items():
        if k < len(places) and places[k] is not None:
            kept[i] = jax.lax.with_sharding_constraint(kept[i], places[k])
    return kept
