"""Stacks host values, one for each replica, to a PerReplica that all processes agree on."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.array_types import PyTree
from tpudist.lowering import placement
from tpudist.options.member_names import format_values
from tpudist.processes import process_agreement
from tpudist.values.per_replica import PerReplica
from tpudist.xla import integers, random_keys, tree_depth
from tpudist.xla.mesh import ReplicaMesh

_KEY = "random key of "  # begins the description of typed keys; others begin with a dtype
_HostArray = np.ndarray | jax.Array
"""An array of numbers, or typed random keys."""


def stack_parts(mesh: ReplicaMesh, parts: Sequence[object]) -> PerReplica:
    """Returns a PerReplica of values for this process's replicas, in order.

    If all replicas are in this process, the values may differ in the size of one dim. Otherwise
    other processes must pass the same shapes.
    """
    arrays = [_as_array(x) for x in parts]
    kinds = {(type(x), x.dtype, x.shape) for x in arrays}
    if len(kinds) == 1 and len(arrays) == mesh.num_replicas:  # almost all calls
        [(kind, dtype, _)] = kinds
        if kind is np.ndarray and dtype.isnative:
            return PerReplica(placement.stack(mesh, np.stack(arrays)))
    return _stack(mesh, arrays, dict(zip(mesh.local_replicas, map(_describe, arrays), strict=True)))


def stack_trees(mesh: ReplicaMesh, make_trees: Callable[[], Sequence[PyTree]]) -> PyTree:
    """Returns a tree of PerReplicas of trees for this process's replicas, in order.

    Args:
        mesh: The mesh of the replicas.
        make_trees: Called once; returns the trees.

    Raises:
        ValueError: If the trees differ in structure, or values in rank or in more than one dim.
        RuntimeError: If another process failed to create its values.
    """
    # Protocol: every process sends the description of its values, or its error, before any process
    # creates the global array. Different shapes would make different programs, and a process that
    # fails without a message would make the others wait.
    if not process_agreement.has_others(mesh):
        structure, columns = _columns(make_trees())
        return structure.unflatten([stack_parts(mesh, column) for column in columns])
    try:
        structure, columns = _columns(make_trees())
        arrays = [[_as_array(x) for x in column] for column in columns]
    except Exception as error:
        _exchange_descriptions(mesh, {"error": f"{type(error).__name__}: {error}"})
        raise
    # In the order of the replicas, without their numbers: then processes with the same kinds of
    # values send the same text, which goes to all of them once.
    own = [list(map(_describe, column)) for column in arrays]
    # By names: the text of a structure may contain the address of a user's class.
    paths = jax.tree_util.tree_flatten_with_path(structure.unflatten(range(len(own))))[0]
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    answers = _exchange_descriptions(mesh, {"structure": names, "values": own})
    _check_answers(mesh, answers)
    stacked = []
    for k, column in enumerate(arrays):
        descriptions: dict[int, Any] = {}
        for process, answer in zip(mesh.processes, answers, strict=True):
            for i, x in zip(mesh.replicas_of_processes[process], answer["values"][k], strict=True):
                if descriptions.setdefault(i, x) != x:
                    raise ValueError(
                        f"Replica {i} spans several processes, which have made different values "
                        f"for it: {descriptions[i]} and {x}. Make the same value in all processes "
                        "of a replica."
                    )
        stacked.append(_stack(mesh, column, descriptions))
    return structure.unflatten(stacked)


def _exchange_descriptions(mesh: ReplicaMesh, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sends this process's description or error; returns those of all processes."""
    intention = process_agreement.Intention("values for each replica")
    texts = process_agreement.exchange(mesh, intention, json.dumps(own))
    different = {text: json.loads(text) for text in dict.fromkeys(texts)}
    return [different[text] for text in texts]


def _check_answers(mesh: ReplicaMesh, answers: Sequence[Mapping[str, Any]]) -> None:
    """Raises the same error in every process if values are missing or differ in structure."""
    by_process = dict(zip(mesh.processes, answers, strict=True))
    for process, answer in by_process.items():
        if "error" in answer:
            raise RuntimeError(
                f"Process {process} made no values for its replicas: {answer['error']}. No process "
                "continues without them. Correct the error in that process."
            )
    if any(x["structure"] != answers[0]["structure"] for x in answers):
        each = format_values("process", {p: x["structure"] for p, x in by_process.items()})
        raise ValueError(
            f"The processes made values of different structures for their replicas: {each}. Return "
            "the same structure for every replica."
        )


def _columns(trees: Sequence[PyTree]) -> tuple[Any, list[list[Any]]]:
    """Returns the structure of the trees, and for each leaf the values of the replicas."""
    for tree in trees:
        tree_depth.check_depth(tree, "A value for a replica")
    structures = {jax.tree.structure(tree) for tree in trees}
    if len(structures) > 1:
        raise ValueError(
            "value_fn returned different structures for different replicas: "
            f"{', '.join(sorted(map(str, structures)))}. Return the same structure for every "
            "replica."
        )
    [structure] = structures  # each process has a replica, so there is a tree
    rows = [structure.flatten_up_to(tree) for tree in trees]
    return structure, [list(column) for column in zip(*rows, strict=True)]


def _describe(array: _HostArray) -> tuple[str, list[int]]:
    """Returns the dtype, or the kind of random keys, and the shape, for other processes."""
    if random_keys.is_key(array):
        return f"{_KEY}{jax.random.key_impl(array)}", list(array.shape)
    return array.dtype.name, list(array.shape)


def _stack(
    mesh: ReplicaMesh,
    local: Sequence[_HostArray],
    descriptions: Mapping[int, tuple[str, Sequence[int]]],
) -> PerReplica:
    """Returns a PerReplica of this process's parts; `descriptions` has those of all replicas."""
    if any(name.startswith(_KEY) for name, _ in descriptions.values()):
        return _stack_keys(mesh, local, descriptions)
    # Over the values of all replicas, not only of this process: all processes must make the same
    # global array.
    dtype = np.result_type(*(jnp.dtype(name) for name, _ in descriptions.values()))
    shapes = {i: tuple(shape) for i, (_, shape) in descriptions.items()}
    if len(set(shapes.values())) == 1:
        return PerReplica(placement.stack(mesh, np.stack(local).astype(dtype, copy=False)))
    ranks = {len(shape) for shape in shapes.values()}
    uneven = [d for d in range(min(ranks)) if len({shape[d] for shape in shapes.values()}) > 1]
    # The last condition: the shapes of replicas of other processes are unknown (`stack_parts`), so
    # the padding could differ between processes.
    if len(ranks) > 1 or len(uneven) > 1 or len(shapes) < mesh.num_replicas:
        each = format_values("replica", {i: list(shapes[i]) for i in sorted(shapes)})
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
    mesh: ReplicaMesh,
    local: Sequence[Any],
    descriptions: Mapping[int, tuple[str, Sequence[int]]],
) -> PerReplica:
    if len({(name, tuple(shape)) for name, shape in descriptions.values()}) > 1:
        keys = sorted(descriptions.items())
        each = format_values("replica", {i: f"{name}{list(shape)}" for i, (name, shape) in keys})
        raise ValueError(
            f"The random keys for the replicas have different kinds or shapes ({each}). Use keys "
            "of one kind and shape for every replica."
        )
    data = placement.stack(mesh, np.stack([np.asarray(jax.random.key_data(x)) for x in local]))
    return PerReplica(jax.random.wrap_key_data(data, impl=jax.random.key_impl(local[0])))


def _as_array(value: object) -> Any:
    """Returns a host array, or random keys as they are; raises for values that are not numbers."""
    if not isinstance(value, np.ndarray) and random_keys.is_key(value):
        return value
    integers.refuse_masks_and_buffers(value, "A value for a replica")
    array = np.asarray(value)
    if array.dtype.kind in "OSUMm":
        raise TypeError(
            f"A value for a replica is {value!r}, but replicas hold only arrays of numbers and "
            "booleans. Pass numbers, and keep other objects in Python."
        )
    return array
