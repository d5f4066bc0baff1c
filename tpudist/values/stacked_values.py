"""Values of the host, one for each replica, as one PerReplica that all processes agree on."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.array_types import PyTree
from tpudist.lowering import placement
from tpudist.processes import process_agreement
from tpudist.values.per_replica import PerReplica
from tpudist.xla import integers, random_keys, tree_depth
from tpudist.xla.mesh import ReplicaMesh

_KEY = "random key of "  # how the kind of a typed key is told from a dtype


def stack_parts(mesh: ReplicaMesh, parts: Sequence[Any]) -> PerReplica:
    """A PerReplica of values that are given for each of this process's replicas, in order.

    They may differ in the size of one dim if all replicas are in this process; otherwise other
    processes have none of them, and must have given the same shapes.
    """
    arrays = [_number(x) for x in parts]
    return _stack(mesh, arrays, dict(zip(mesh.local_replicas, map(_describe, arrays), strict=True)))


def stack_trees(mesh: ReplicaMesh, make_trees: Callable[[], Sequence[PyTree]]) -> PyTree:
    """A tree of PerReplicas of the trees that are made for this process's replicas, in order.

    The processes tell each other what they made: the shapes are one global array's, so no process
    may make it of others, and one that fails must not be waited for.

    Raises:
        ValueError: The trees differ in structure, or values in rank or in more than one dim.
        RuntimeError: Another process has made no values.
    """
    if mesh.num_processes == 1:
        structure, columns = _columns(make_trees())
        return structure.unflatten([stack_parts(mesh, column) for column in columns])
    try:
        structure, columns = _columns(make_trees())
        arrays = [[_number(x) for x in column] for column in columns]
    except Exception as error:
        _exchange_descriptions(mesh, {"error": f"{type(error).__name__}: {error}"})
        raise
    made = [
        {i: _describe(x) for i, x in zip(mesh.local_replicas, column, strict=True)}
        for column in arrays
    ]
    # By names: what a structure says of a user's class may be another address in each process.
    paths = jax.tree_util.tree_flatten_with_path(structure.unflatten(range(len(made))))[0]
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    said = {"structure": names, "made": made}
    answers = _exchange_descriptions(mesh, said)
    _check_answers(mesh, answers)
    stacked = []
    for k, column in enumerate(arrays):
        every: dict[int, Any] = {}
        for i, x in (item for answer in answers for item in answer["made"][k].items()):
            if every.setdefault(int(i), x) != x:
                raise ValueError(
                    f"Replica {i} spans several processes, which have made different values for "
                    f"it: {every[int(i)]} and {x}. Make the same value in all processes of a "
                    "replica."
                )
        stacked.append(_stack(mesh, column, every))
    return structure.unflatten(stacked)


def _exchange_descriptions(mesh: ReplicaMesh, said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What all processes say of the values that they have made."""
    what = process_agreement.Intention("values for each replica")
    return [json.loads(x) for x in process_agreement.exchange(mesh, what, json.dumps(said))]


def _check_answers(mesh: ReplicaMesh, answers: Sequence[Mapping[str, Any]]) -> None:
    """Before anything is made of them, in every process in the same way."""
    by_process = dict(zip(mesh.processes, answers, strict=True))
    for process, answer in by_process.items():
        if "error" in answer:
            raise RuntimeError(
                f"Process {process} made no values for its replicas: {answer['error']}. No process "
                "continues without them. Correct the error in that process."
            )
    if any(x["structure"] != answers[0]["structure"] for x in answers):
        each = ", ".join(f"{p}: {x['structure']}" for p, x in by_process.items())
        raise ValueError(
            f"The processes made values of different structures for their replicas: {each}. Return "
            "the same structure for every replica."
        )


def _columns(trees: Sequence[PyTree]) -> tuple[Any, list[list[Any]]]:
    """The structure of the trees, and for each leaf what the replicas have there."""
    for tree in trees:
        tree_depth.check_depth(tree, "A value for a replica")
    structures = {jax.tree.structure(tree) for tree in trees}
    if len(structures) > 1:
        raise ValueError(
            "value_fn returned different structures for different replicas: "
            f"{', '.join(sorted(map(str, structures)))}. Return the same structure for every "
            "replica."
        )
    [structure] = structures
    rows = [structure.flatten_up_to(tree) for tree in trees]
    return structure, [list(column) for column in zip(*rows, strict=True)]


def _describe(array: Any) -> tuple[str, list[int]]:
    """Of what dtype and shape an array is, for other processes; random keys are of their kind."""
    if random_keys.is_key(array):
        return f"{_KEY}{jax.random.key_impl(array)}", list(array.shape)
    return array.dtype.name, list(array.shape)


def _stack(
    mesh: ReplicaMesh, local: Sequence[Any], every: Mapping[int, tuple[str, Sequence[int]]]
) -> PerReplica:
    """A PerReplica of this process's parts, where all parts are described in `every`."""
    if any(name.startswith(_KEY) for name, _ in every.values()):
        return _stack_keys(mesh, local, every)
    dtype = np.result_type(*(jnp.dtype(name) for name, _ in every.values()))
    shapes = {i: tuple(shape) for i, (_, shape) in every.items()}
    if len(set(shapes.values())) == 1:
        return PerReplica(placement.stack(mesh, np.stack(local).astype(dtype, copy=False)))
    ranks = {len(shape) for shape in shapes.values()}
    uneven = [d for d in range(min(ranks)) if len({shape[d] for shape in shapes.values()}) > 1]
    if len(ranks) > 1 or len(uneven) > 1 or len(shapes) < mesh.num_replicas:
        each = ", ".join(f"{i}: {list(shape)}" for i, shape in sorted(shapes.items()))
        raise ValueError(
            f"The values for the replicas have different shapes ({each}). They may differ only in "
            "the size of one dim. Use the same shape for every replica, or put the differences in "
            "one dim."
        )
    [dim] = uneven
    rows = tuple(shapes[i][dim] for i in range(mesh.num_replicas))
    padded = []
    for x in local:
        padding = [(0, 0)] * x.ndim
        padding[dim] = (0, max(rows) - x.shape[dim])
        padded.append(np.pad(x, padding))
    stacked = np.stack(padded).astype(dtype, copy=False)
    return PerReplica(placement.stack(mesh, stacked), rows, dim)


def _stack_keys(
    mesh: ReplicaMesh, local: Sequence[Any], every: Mapping[int, tuple[str, Sequence[int]]]
) -> PerReplica:
    kinds = {(name, tuple(shape)) for name, shape in every.values()}
    if len(kinds) > 1:
        each = ", ".join(f"{i}: {name}{list(shape)}" for i, (name, shape) in sorted(every.items()))
        raise ValueError(
            f"The random keys for the replicas have different kinds or shapes ({each}). Use keys "
            "of one kind and shape for every replica."
        )
    data = placement.stack(mesh, np.stack([np.asarray(jax.random.key_data(x)) for x in local]))
    return PerReplica(jax.random.wrap_key_data(data, impl=jax.random.key_impl(local[0])))


def _number(value: Any) -> Any:
    if random_keys.is_key(value):
        return value
    integers.refuse_masks_and_buffers(value, "A value for a replica")
    array = np.asarray(value)
    if array.dtype.kind in "OSUMm":
        raise TypeError(
            f"A value for a replica is {value!r}, but replicas hold only arrays of numbers and "
            "booleans. Pass numbers, and keep other objects in Python."
        )
    return array
