"""State that a replica function takes as an argument and gives back, as `jax.jit` users write it.

The new state is to lie where the old one lay: left to itself XLA splits a result as it likes, and
the next call, which gets it as an argument, would compile another program.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.run.arguments.inputs import Inputs
from tpudist.run.outputs.results import CallOutputs

# How deep in a result the state is looked for: in `{"train": (state, ema)}`, for one.
_DEPTH = 3
Form = tuple[tuple[int, ...], Any]
"""Shape and dtype of an array, as one replica sees it."""


def find_returned_state(
    result: Any,
    results: Sequence[Form | None],
    structure: Sequence[Any],
    arguments: Sequence[Form | None],
) -> tuple[dict[int, int], set[int]]:
    """For each leaf of a result that is a new part of an argument: which leaf it replaces.

    That is so for a part of the result that is nested as a whole argument is, with arrays of the
    same shapes and dtypes. Gradients are nested so too; with an integer among the leaves, such as
    the number of the step, they are none: such leaves come as well, as the second.

    Args:
        result: How the result is nested.
        results: Of its leaves; None for what is no array of the program.
        structure: How each argument is nested.
        arguments: Of the flat arguments; None for what is no array, or one for each replica.
    """
    wholes, first = [], 0
    for treedef in structure:
        wholes.append((treedef, first))
        first += treedef.num_leaves
    returned: dict[int, int] = {}
    certain: set[int] = set()
    taken: set[int] = set()
    for part, start in _parts(result, 0, _DEPTH):
        for treedef, first in wholes:
            if part != treedef or first in taken or start in returned:
                continue
            places = range(part.num_leaves)
            pairs = {
                start + i: first + i
                for i in places
                if results[start + i] is not None and arguments[first + i] is not None
            }
            if pairs and all(results[i] == arguments[k] for i, k in pairs.items()):
                taken.add(first)
                returned |= {i: k for i, k in pairs.items() if i not in returned}
                if any(_is_no_gradient(results[start + i]) for i in places):
                    certain |= set(pairs)
                break
    return returned, certain


def _is_no_gradient(form: Form | None) -> bool:
    """Whether a leaf cannot be of a tree of gradients: an integer, a key, or no array at all."""
    return form is None or not jnp.issubdtype(form[1], jnp.inexact)


def find_returned_outputs(
    found: CallOutputs, structure: Sequence[Any], inputs: Inputs, closed: Any, num_variables: int
) -> tuple[dict[int, int], set[int]]:
    """The same for a trace: for each such output the number of the input, after the Variables.

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
    sources = closed.in_avals[num_variables:]
    arguments = [
        _form_of(sources[fed[leaf][0]]) if len(fed.get(leaf, ())) == 1 else None
        for leaf in range(sum(treedef.num_leaves for treedef in structure))
    ]
    results = [
        _form_of(closed.out_avals[what]) if kind == "array" else None for kind, what in found.result
    ]
    leaves, certain = find_returned_state(found.treedef, results, structure, arguments)
    outputs = {i: found.result[i][1] for i in leaves}
    return {outputs[i]: fed[k][0] for i, k in leaves.items()}, {outputs[i] for i in certain}


def _form_of(aval: Any) -> Form:
    return tuple(aval.shape), aval.dtype


def _parts(treedef: Any, start: int, depth: int) -> Iterator[tuple[Any, int]]:
    """The parts of a structure, outer ones first, each with the number of its first leaf."""
    if not treedef.num_leaves:
        return
    yield treedef, start
    if depth:
        for child in treedef.children():
            yield from _parts(child, start, depth - 1)
            start += child.num_leaves


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
