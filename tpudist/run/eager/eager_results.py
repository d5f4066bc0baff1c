"""Merges the results of replicas that ran eagerly, as a compiled function returns them.

An array becomes one array of the strategy if it does not depend on values that differ between
replicas, or was reduced. Any other array becomes a PerReplica, even if its values are equal.
`run/eager/replica_evaluation.py` explains how that is known.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from tpudist.array_types import PyTree
from tpudist.lowering import placement, replica_parts
from tpudist.run.arguments import call_description
from tpudist.run.arguments.containers import unpack
from tpudist.run.eager import host_values
from tpudist.run.eager.replica_group import ReplicaGroup
from tpudist.run.outputs import state_collections
from tpudist.run.outputs.returned_state import ArrayForm, find_returned_state
from tpudist.state import nnx_contents
from tpudist.state.variable import Variable
from tpudist.values.per_replica import PerReplica
from tpudist.xla.array_attributes import has_dtype, has_shape
from tpudist.xla.mesh import ReplicaMesh


@dataclasses.dataclass
class ReplicaResult:
    """The outcome of the function on one replica.

    Attributes:
        arguments: The replica's own arguments, by the number of the flat argument.
        copies: The replica's copies of the NNX objects.
        entered: Values of the NNX objects when the replica starts.
    """

    result: PyTree
    arguments: dict[int, Any]
    copies: tuple
    entered: list[PyTree]


def merge_results(run: ReplicaGroup, replica_results: Sequence[ReplicaResult]) -> PyTree:
    """Returns the results of the replicas as one result.

    Raises:
        ValueError: If replicas returned different structures, or different Python objects.
    """
    flat = [_flatten(run, x) for x in replica_results]
    leaves, treedef = flat[0]
    for replica, (other, structure) in enumerate(flat):
        if structure != treedef or len(other) != len(leaves):
            raise ValueError(
                f"'{run.name}' returned a different structure on replica {replica} than on replica "
                f"0: {structure}, and {treedef}. Return the same structure on all replicas."
            )
    merged = [_merge(run, [x[0][k] for x in flat]) for k in range(len(leaves))]
    _combine_collections(run, merged, treedef)
    return treedef.unflatten(merged)


def _combine_collections(run: ReplicaGroup, merged: list[Any], treedef: PyTreeDef) -> None:
    """Combines returned state that differs between replicas, in place; see `state_collections`.

    `StateOutputs.place_collections` does the same for compiled functions.
    """
    if run.mesh.num_replicas == 1 or not any(isinstance(x, PerReplica) for x in merged):
        return
    results = [_form_of(x) for x in merged]
    arguments = [None if isinstance(x, PerReplica) else _form_of(x) for x in run.leaves]
    for i in run.kinds.numbers:
        arguments[i] = (), jax.numpy.result_type(run.leaves[i])
    returned, not_gradients = find_returned_state(treedef, results, run.structure, arguments)
    labels = call_description.names_of_leaves(run.fn, run.args, run.kwargs)
    rules = dict(run.rules)
    others = [i for i, x in enumerate(merged) if isinstance(x, PerReplica) and i not in returned]
    names = state_collections.find_collections(treedef, others, rules)
    names |= {i: labels[k] for i, k in returned.items() if isinstance(merged[i], PerReplica)}
    differing = {i: (label, merged[i].dtype) for i, label in names.items()}
    causes = dict.fromkeys(differing, "its new value differs between replicas")
    decided = state_collections.decide(differing, not_gradients, causes, rules, run.name)
    for i, op in decided.items():
        if op is None:
            first = replica_parts.component(run.mesh, merged[i].array, run.mesh.local_replicas[0])
            merged[i] = jax.device_put(first, run.mesh.replicated)
        else:
            dtype = merged[i].dtype
            merged[i] = run.strategy.reduce(op, merged[i], axis=None).astype(dtype)


def _form_of(x: Any) -> ArrayForm | None:
    # Arrays of any library, PerReplicas and Variables have both; other results do not.
    return (tuple(x.shape), x.dtype) if has_dtype(x) and has_shape(x) else None


def _flatten(run: ReplicaGroup, outcome: ReplicaResult) -> tuple[list[Any], PyTreeDef]:
    """Returns the leaves of a result and its nesting, with the caller's objects, not copies."""
    nodes: dict[int, Any] = {}
    if run.binding is not None:
        own = nnx_contents.nodes_of(outcome.copies)
        callers = nnx_contents.nodes_of(run.binding.objects())
        nodes = {id(x): y for x, y in zip(own, callers, strict=True)}
    arguments: dict[int, Any] = {}
    if run.groups is None:  # the compiled program for partial batches returns arguments as arrays
        arguments = {
            id(x): run.leaves[i] for i, x in outcome.arguments.items() if isinstance(x, jax.Array)
        }

    def is_leaf(x: object) -> bool:
        return id(x) in nodes or isinstance(x, PerReplica | Variable)

    result = unpack(outcome.result, is_leaf, lambda x: isinstance(x, jax.Array))
    leaves, treedef = jax.tree.flatten(result, is_leaf=is_leaf)

    def mark(x: object) -> object:
        of_caller = nodes.get(id(x), arguments.get(id(x)))
        return x if of_caller is None else _ReturnedArgument(of_caller, x)

    return list(map(mark, leaves)), treedef


@dataclasses.dataclass
class _ReturnedArgument:
    """An argument that is returned unchanged: the caller's object, and the replica's copy."""

    of_caller: Any
    of_replica: Any


def _merge(run: ReplicaGroup, parts: list[Any]) -> Any:
    first = parts[0]
    if all(isinstance(x, _ReturnedArgument) and x.of_caller is first.of_caller for x in parts):
        return first.of_caller
    parts = [x.of_replica if isinstance(x, _ReturnedArgument) else x for x in parts]
    if all(isinstance(x, jax.Array) for x in parts):
        differ = any(run.frames[i].evaluation.depends_on_replica(x) for i, x in enumerate(parts))
        return merge_arrays(run.mesh, [host_values.fetch(x) for x in parts], differ, run)
    return merge_objects(run, parts)


def merge_objects(run: ReplicaGroup, parts: list[Any]) -> Any:
    """Merges values that are not all arrays: they must be equal on all replicas.

    Raises:
        ValueError: If objects differ that are not numbers.
    """
    first = parts[0]
    if all(x is first for x in parts):
        return first
    numbers = all(
        isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex)
        for x in parts
    )
    if numbers:
        hosts = [np.asarray(x) for x in parts]
        if host_values.are_equal(hosts):
            return first
        return merge_arrays(run.mesh, hosts, True, run)
    try:
        if all(type(x) is type(first) and bool(x == first) for x in parts):
            return first
    except Exception:  # objects that cannot be compared count as different
        pass
    other = next(i for i, x in enumerate(parts) if x is not first)
    raise ValueError(
        f"Replica 0 of '{run.name}' gave {first!r}, and replica {other} gave {parts[other]!r}. "
        "Only arrays and numbers can differ between replicas."
    )


def merge_arrays(
    mesh: ReplicaMesh, hosts: list[Any], may_differ: bool, run: ReplicaGroup
) -> jax.Array | PerReplica:
    """Returns host values of all replicas as one array; as a PerReplica if they may differ.

    Args:
        hosts: The host value of each replica.
        may_differ: Whether they may differ in another call, even if they are equal here.

    Raises:
        ValueError: If the values have different numbers of dims.
    """
    if mesh.num_replicas == 1 or (not may_differ and host_values.are_equal(hosts)):
        return jax.device_put(host_values.to_array(hosts[0]), mesh.replicated)
    shapes = {tuple(x.shape) for x in hosts}
    if len(shapes) == 1:
        return PerReplica(_stack(mesh, hosts))
    ranks = {len(shape) for shape in shapes}
    if len(ranks) > 1:
        raise ValueError(
            f"The replicas of '{run.name}' gave arrays of shapes {sorted(shapes)} for one value. "
            "The numbers of rows may differ, but not the numbers of dims."
        )
    extents = {}
    for dim in range(min(ranks)):
        sizes = tuple(x.shape[dim] for x in hosts)
        if len(set(sizes)) > 1:
            extents[dim] = sizes
    padded = {dim: _size_of_dim(run, dim, sizes) for dim, sizes in extents.items()}
    stacked = _stack(mesh, [_pad(x, padded) for x in hosts])
    (dim, rows), *others = extents.items()
    return PerReplica(stacked, rows, dim, tuple(others))


def _size_of_dim(run: ReplicaGroup, dim: int, sizes: tuple[int, ...]) -> int:
    """Returns the padded size of a dim with these rows: the size of a batch with the same rows."""
    if run.groups is not None:
        for size, rows in zip(run.groups.sizes, run.rows, strict=True):
            if rows == sizes:
                return size
    return max(sizes)


def _pad(x: np.ndarray, sizes: dict[int, int]) -> np.ndarray:
    return np.pad(x, [(0, sizes.get(d, n) - n) for d, n in enumerate(x.shape)])


def _stack(mesh: ReplicaMesh, hosts: list[Any]) -> jax.Array:
    stacked = host_values.stack_values(hosts)
    if isinstance(stacked, np.ndarray):
        return placement.stack(mesh, stacked)
    return jax.device_put(host_values.to_array(stacked), mesh.stacked)


def real_parts(mesh: ReplicaMesh, value: PerReplica) -> list[jax.Array]:
    """Returns the parts of a PerReplica, without padding."""
    parts = []
    for i in range(mesh.num_replicas):
        part = replica_parts.component(mesh, value.array, i)
        for dim, rows in value.extents.items() if value.is_padded else ():
            with placement.without_mesh():
                part = jax.lax.slice_in_dim(part, 0, rows[i], axis=dim)
        parts.append(part)
    return parts
