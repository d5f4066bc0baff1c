"""`merge_call` of replicas that run eagerly: called once for all, with the arguments of all.

The function is that of replica 0. If it captures a value of its replica, instead of getting it as
an argument, all replicas get the value of replica 0, and not their own as in a compiled program.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.run.eager import eager_results, host_values, written_state
from tpudist.run.eager.eager_frame import EagerFrame
from tpudist.run.eager.host_values import HostKeys, HostValue
from tpudist.run.eager.replica_group import ReplicaGroup
from tpudist.state import nnx_contents
from tpudist.state.variable import Variable
from tpudist.values.per_replica import PerReplica, is_distributed


@dataclasses.dataclass(frozen=True)
class _MergeArgument:
    """An argument of a merge call, of one replica.

    Attributes:
        value: A host value if it is an array, or else the object.
        differs: Whether replicas may have different values.
    """

    value: object
    differs: bool


@dataclasses.dataclass(frozen=True)
class _MergeResult:
    """A host value that a merge call returns to one replica; `own` if others may get another."""

    value: HostValue
    own: bool


def call_merged(
    run: ReplicaGroup,
    replica: int,
    fn: Callable[..., PyTree],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> PyTree:
    """Calls `fn(strategy, *args, **kwargs)` once all replicas have arrived.

    Returns:
        This replica's part of the result.
    """
    frame = run.frames[replica]
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=_is_leaf)
    contribution = fn, treedef, [_make_argument(run, frame, x) for x in leaves]
    result = run.meet(replica, "merge_call", contribution, functools.partial(_call, run))
    return jax.tree.map(
        lambda x: frame.evaluation.put(x.value, own=x.own) if isinstance(x, _MergeResult) else x,
        result,
        is_leaf=lambda x: isinstance(x, _MergeResult) or is_distributed(x),
    )


def _make_argument(run: ReplicaGroup, frame: EagerFrame, x: object) -> _MergeArgument:
    if isinstance(x, nnx_contents.OBJECT_TYPES):
        raise TypeError(
            f"merge_call of '{run.name}' received a {type(x).__name__}. Each replica has its "
            "own copy of it while replicas run eagerly. Pass its arrays, and change the object "
            "in the replica function."
        )
    if isinstance(x, PerReplica):
        x = jax.numpy.asarray(x)
    if isinstance(x, jax.Array):
        return _MergeArgument(host_values.fetch(x), not frame.is_same_everywhere(x))
    return _MergeArgument(x, False)


def _call(run: ReplicaGroup, contributions: list[Any]) -> list[PyTree]:
    """Calls the function; returns the result of each replica."""
    fn, treedef, leaves = contributions[0]
    for replica, (_, other, _) in enumerate(contributions):
        if other != treedef:
            raise ValueError(
                f"merge_call of '{run.name}' received different arguments on replica {replica} "
                f"than on replica 0: {other}, and {treedef}. Pass the same structure on all "
                "replicas."
            )
    # In cross-replica context, Variables have the values that the replicas have assigned so far.
    written_state.write_variables(run)
    merged = [_merge(run, [x[2][k] for x in contributions]) for k in range(len(leaves))]
    args, kwargs = treedef.unflatten(merged)
    with run.strategy.scope():
        result = fn(run.strategy, *args, **kwargs)
    flat, structure = jax.tree.flatten(result, is_leaf=_is_leaf)
    parts = [_split(run, x) for x in flat]
    return [structure.unflatten([p[i] for p in parts]) for i in range(run.mesh.num_replicas)]


def _merge(run: ReplicaGroup, parts: list[_MergeArgument]) -> Any:
    values = [x.value for x in parts]
    if any(x.differs for x in parts):
        hosts = [x if isinstance(x, np.ndarray | HostKeys) else np.asarray(x) for x in values]
        return eager_results.merge_arrays(run.mesh, hosts, True, run)
    if not isinstance(values[0], np.ndarray | HostKeys):
        return eager_results.merge_objects(run, values)
    return eager_results.merge_arrays(run.mesh, values, False, run)


def _split(run: ReplicaGroup, x: object) -> list[object]:
    """Returns for each replica its part of a leaf of the function's result."""
    count = run.mesh.num_replicas
    if isinstance(x, PerReplica):
        parts = eager_results.real_parts(run.mesh, x)
        return [_MergeResult(host_values.fetch(part), True) for part in parts]
    if isinstance(x, jax.Array):
        return [_MergeResult(host_values.fetch(x), False)] * count
    return [x] * count


def _is_leaf(x: object) -> bool:
    return is_distributed(x) or isinstance(x, (Variable, *nnx_contents.OBJECT_TYPES))
