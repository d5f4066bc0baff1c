"""`merge_call` of replicas that run eagerly: once for all of them, with what all have brought."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpudist.run.eager import eager_results, replica_evaluation, written_state
from tpudist.run.eager.replica_group import ReplicaGroup
from tpudist.state import nnx_contents
from tpudist.state.variable import Variable
from tpudist.values.per_replica import PerReplica, is_distributed


def call_merged(
    run: ReplicaGroup,
    replica: int,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls `fn(strategy, *args, **kwargs)` when all replicas have come; this one's part of it."""
    frame = run.frames[replica]
    leaves, treedef = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=_is_leaf)
    brought = fn, treedef, [_Brought.of(run, frame, x) for x in leaves]
    result = run.meet(replica, "merge_call", brought, lambda all_brought: _call(run, all_brought))
    return jax.tree.map(
        lambda x: frame.evaluation.put(x.value, own=x.own) if isinstance(x, _Taken) else x,
        result,
        is_leaf=lambda x: isinstance(x, _Taken) or is_distributed(x),
    )


class _Brought:
    """An argument of a merge call, of one replica."""

    def __init__(self, value: Any, differs: bool):
        self.value, self.differs = value, differs

    @classmethod
    def of(cls, run: ReplicaGroup, frame: Any, x: Any) -> "_Brought":
        """A host value of an array; `differs` if it is this replica's own, for all we know."""
        if isinstance(x, nnx_contents.OBJECT_TYPES):
            raise TypeError(
                f"merge_call of '{run.name}' received a {type(x).__name__}. Each replica has its "
                "own copy of it while replicas run eagerly. Pass its arrays, and change the object "
                "in the replica function."
            )
        if isinstance(x, PerReplica):
            x = jax.numpy.asarray(x)
        if isinstance(x, jax.Array):
            return cls(replica_evaluation.fetch(x), not frame.is_same_everywhere(x))
        return cls(x, False)


class _Taken:
    """An array that a merge call gives to one replica."""

    def __init__(self, value: Any, own: bool):
        self.value, self.own = value, own


def _call(run: ReplicaGroup, brought: list[Any]) -> list[Any]:
    fn, treedef, leaves = brought[0]
    for replica, (_, other, _) in enumerate(brought):
        if other != treedef:
            raise ValueError(
                f"merge_call of '{run.name}' received different arguments on replica {replica} "
                f"than on replica 0: {other}, and {treedef}. Pass the same structure on all "
                "replicas."
            )
    written_state.write_variables(run)
    merged = [_merge(run, [x[2][k] for x in brought]) for k in range(len(leaves))]
    args, kwargs = treedef.unflatten(merged)
    with run.strategy.scope():
        result = fn(run.strategy, *args, **kwargs)
    flat, structure = jax.tree.flatten(result, is_leaf=_is_leaf)
    count = run.mesh.num_replicas
    parts = [_split(run, x) for x in flat]
    return [structure.unflatten([p[i] for p in parts]) for i in range(count)]


def _merge(run: ReplicaGroup, parts: list[_Brought]) -> Any:
    if any(x.differs for x in parts):
        hosts = [x.value if hasattr(x.value, "shape") else np.asarray(x.value) for x in parts]
        return eager_results.merge_arrays(run.mesh, hosts, True, run)
    if not isinstance(parts[0].value, np.ndarray | replica_evaluation.HostKeys):
        return eager_results.merge_objects(run, [x.value for x in parts])
    return eager_results.merge_arrays(run.mesh, [x.value for x in parts], False, run)


def _split(run: ReplicaGroup, x: Any) -> list[Any]:
    """What each replica gets of a leaf of what the function returned."""
    count = run.mesh.num_replicas
    if isinstance(x, PerReplica):
        return [
            _Taken(replica_evaluation.fetch(p), True) for p in eager_results.real_parts(run.mesh, x)
        ]
    if isinstance(x, jax.Array):
        return [_Taken(replica_evaluation.fetch(x), False)] * count
    return [x] * count


def _is_leaf(x: Any) -> bool:
    return is_distributed(x) or isinstance(x, (Variable, *nnx_contents.OBJECT_TYPES))
