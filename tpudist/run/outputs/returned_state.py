"""Finds state that a replica function takes as an argument and returns, as in `jax.jit` programs.

The new state must keep the sharding of the old one. Without a constraint XLA chooses the sharding
of a result, and the next call, which gets it as an argument, would compile another program.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from tpudist.programs.jaxprs import ClosedJaxpr
from tpudist.run.arguments.inputs import Inputs
from tpudist.run.outputs.results import CallOutputs, LeafKind

# Levels of a result that are searched for state: `{"train": (state, ema)}` needs two of them. One
# more is searched, and no further, since each level compares more parts with each argument.
_DEPTH = 3
ArrayForm = tuple[tuple[int, ...], Any]
"""Shape and dtype of an array, as one replica sees it."""


def find_returned_state(
    result: PyTreeDef,
    results: Sequence[ArrayForm | None],
    structure: Sequence[PyTreeDef],
    arguments: Sequence[ArrayForm | None],
) -> tuple[dict[int, int], set[int]]:
    """Returns the leaves of a result that are returned state, with the flat arguments they replace.

    State is a part of the result that has the nesting of a complete argument, and arrays of the
    same shapes and dtypes. Gradients look the same, unless the state has an integer, such as the
    number of the step, which gradients do not have.

    Args:
        results: Forms of its leaves; None if a leaf is not an array of the program.
        structure: Nesting of each argument.
        arguments: Forms of the flat arguments; None if one is not an array, or has one part per
            replica.

    Returns:
        The leaf of each argument by leaf of the result; and those leaves of the result that are
        certainly not gradients.
    """
    # Outer parts come first, so a complete `TrainState` wins over the trees inside it. Each
    # argument and each leaf of the result is matched once.
    starts = itertools.accumulate((x.num_leaves for x in structure), initial=0)
    argument_trees = list(zip(structure, starts, strict=False))  # one start more: the end
    returned: dict[int, int] = {}
    not_gradients: set[int] = set()
    taken: set[int] = set()
    for part, start in _parts(result, 0, _DEPTH):
        for treedef, first in argument_trees:
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
                if not all(_may_be_gradient(results[start + i]) for i in places):
                    not_gradients |= set(pairs)
                break
    return returned, not_gradients


def _may_be_gradient(form: ArrayForm | None) -> bool:
    """Whether a leaf may belong to a tree of gradients: not an integer, a key, or an object."""
    return form is not None and jnp.issubdtype(form[1], jnp.inexact)


def find_returned_outputs(
    found: CallOutputs,
    structure: Sequence[PyTreeDef],
    inputs: Inputs,
    closed: ClosedJaxpr,
    num_variables: int,
) -> tuple[dict[int, int], set[int]]:
    """Returns the outputs of a trace that are returned state, with the inputs they replace.

    `structure` is the nesting of each argument. The first `num_variables` inputs are Variables.

    Returns:
        The number of the input, after the Variables, by output; and those outputs that are
        certainly not gradients.
    """
    fed: dict[int, list[int]] = {}
    for k, leaf in enumerate(inputs.leaves_of_arguments, inputs.num_nnx):
        if not inputs.stacked[k]:  # state with one part per replica may keep it
            fed.setdefault(leaf, []).append(k)
    sources = closed.in_avals[num_variables:]
    arguments = [
        _form_of(sources[fed[leaf][0]]) if len(fed.get(leaf, ())) == 1 else None
        for leaf in range(sum(treedef.num_leaves for treedef in structure))
    ]
    results = [
        _form_of(closed.out_avals[output]) if kind is LeafKind.ARRAY else None
        for kind, output in found.result
    ]
    leaves, not_gradients = find_returned_state(found.treedef, results, structure, arguments)
    outputs = {i: found.result[i][1] for i in leaves}
    return {outputs[i]: fed[k][0] for i, k in leaves.items()}, {outputs[i] for i in not_gradients}


def _form_of(aval: jax.ShapeDtypeStruct) -> ArrayForm:
    return tuple(aval.shape), aval.dtype


def _parts(treedef: PyTreeDef, start: int, depth: int) -> Iterator[tuple[PyTreeDef, int]]:
    """Yields the parts of a structure, outer ones first, with the number of their first leaf."""
    if not treedef.num_leaves:
        return
    yield treedef, start
    if depth:
        for child in treedef.children():
            yield from _parts(child, start, depth - 1)
            start += child.num_leaves


def keep_places(
    outputs: Sequence[jax.Array],
    returned: Mapping[int, int],
    places: Sequence[NamedSharding | None],
) -> list[jax.Array]:
    """Returns the traced global outputs; returned state is split as the state that it replaces.

    `returned` and `places` number the flat inputs after the Variables.
    """
    kept = list(outputs)
    for i, k in returned.items():
        if k < len(places) and places[k] is not None:
            kept[i] = jax.lax.with_sharding_constraint(kept[i], places[k])
    return kept
