"""Checks and writes the state that eager replicas have changed, once all have ended.

Each replica has changed its own copy. Their values replace the proof of a compiled program: state
that replicas share must be equal, to the last bit.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from tpudist.array_types import PyTree
from tpudist.context.protocols import VariableLike
from tpudist.context.strategy_base import StrategyBase
from tpudist.options.member_names import format_members
from tpudist.programs import accumulation
from tpudist.reduce_op import ReduceOp, VariableAggregation
from tpudist.run.eager import host_values
from tpudist.run.eager.eager_results import ReplicaResult
from tpudist.run.eager.host_values import HostKeys, HostValue
from tpudist.run.eager.replica_group import ReplicaGroup
from tpudist.run.outputs import divergence
from tpudist.state import nnx_binding
from tpudist.values.per_replica import PerReplica, open_parts
from tpudist.xla import collectives
from tpudist.xla.mesh import ReplicaMesh

_SUM, _NONE = VariableAggregation.SUM, VariableAggregation.NONE


def save(strategy: StrategyBase, binding: nnx_binding.Binding | None) -> list[tuple[Any, Any]]:
    """Returns the values of Variables and NNX objects, for `restore`, without copying arrays."""
    values: list[tuple[Any, Any]] = [(v, v._value) for v in strategy._list_variables()]
    return values + ([(binding, binding.values())] if binding is not None else [])


def restore(saved: list[tuple[Any, Any]]) -> None:
    """Assigns the values that `save` has returned again."""
    for holder, value in saved:
        if isinstance(holder, nnx_binding.Binding):
            pairs = [(v, x) for v, x in zip(holder.variables, value, strict=True) if v is not None]
            nnx_binding.write([v for v, _ in pairs], [x for _, x in pairs])
        else:
            holder._value = value


def write(run: ReplicaGroup, outcomes: Sequence[ReplicaResult]) -> None:
    """Writes the state that the replicas have changed.

    Raises:
        ValueError: If state that they share differs between them.
    """
    refused: list[tuple[str, str, str]] = []
    variables = _collect_variables(run, refused)
    leaves = _collect_objects(run, outcomes, refused)
    if refused:
        raise ValueError(divergence.describe_divergence(run.name, refused))
    for variable, value in variables.items():
        _set(run.strategy, variable, value)
    if leaves:
        assert run.binding is not None, "they are its leaves"
        holders = [run.binding.variables[i] for i in leaves]
        nnx_binding.write(holders, list(leaves.values()))


def check_structure(run: ReplicaGroup, outcomes: Sequence[ReplicaResult]) -> None:
    """Raises ValueError if the structure of an NNX object has changed on some replica."""
    binding = run.binding
    if binding is None:
        return
    for x in outcomes:
        values = binding.values_of(x.copies)
        if values is None or jax.tree.structure(values) != open_parts(binding.values())[0]:
            change = binding.describe_changes(x.copies)
            raise ValueError(divergence.describe_structure_change(run.name, change))


class NotSums(Exception):
    """The function does more to sums over examples, `leaves` of the binding, than add to them."""

    def __init__(self, leaves: Collection[int]):
        super().__init__(leaves)
        self.leaves = frozenset(leaves)


def watch_sums(run: ReplicaGroup, entered: Sequence[PyTree]) -> accumulation.Watch | None:
    """Returns a watch of the sums over examples in NNX's averages; None if there are none.

    `entered` are the values of the NNX objects with which the replica begins.
    """
    binding, rules = run.binding, dict(run.rules)
    assert binding is not None, "the values belong to its objects"
    sums = {
        i: x
        for i, x in enumerate(entered)
        if binding.is_average(i)
        and i not in run.not_sums
        and binding.aggregation(i, rules) is _SUM
        and isinstance(x, jax.Array)
    }
    return accumulation.Watch(sums) if sums else None


def check_sums(run: ReplicaGroup, outcomes: Sequence[ReplicaResult]) -> None:
    """Raises NotSums if a replica does more to such a sum than add to it."""
    replaced: set[int] = set()
    for replica, x in enumerate(outcomes):
        watch = run.frames[replica].evaluation.watch
        if watch is not None:
            assert run.binding is not None, "it has the sums"
            values = run.binding.values_of(x.copies)
            assert values is not None, "`check_structure` has checked that"
            replaced |= watch.find_replaced(dict(enumerate(values)))
    if replaced:
        raise NotSums(replaced)


def write_variables(run: ReplicaGroup) -> None:
    """Writes the Variables that were assigned so far, before code runs in cross-replica context."""
    refused: list[tuple[str, str, str]] = []
    variables = _collect_variables(run, refused)
    if refused:
        raise ValueError(divergence.describe_divergence(run.name, refused))
    for variable, value in variables.items():
        _set(run.strategy, variable, value)


def _collect_variables(run: ReplicaGroup, refused: list[tuple[str, str, str]]) -> dict[Any, Any]:
    """Returns the new host values of the Variables that some replica has assigned.

    The replicas forget their values of all Variables: their next reads ask the strategy.
    """
    frames = [run.frames[i] for i in range(run.mesh.num_replicas)]
    new_values = {}
    for variable in dict.fromkeys(v for frame in frames for v in frame.written):
        parts = [frame.fetch(variable) for frame in frames]
        if variable.on_read:
            new_values[variable] = host_values.stack_values(parts)
        elif host_values.are_equal(parts):
            new_values[variable] = parts[0]
        else:
            name = f"Variable '{variable.name}'"
            refused.append((name, _describe_difference(parts), divergence.VARIABLE_REMEDY))
    for frame in frames:
        frame.forget_values()
    return new_values


def _set(strategy: StrategyBase, variable: VariableLike, value: HostValue) -> None:
    old = variable._value
    new = strategy._place_variable(variable, host_values.to_array(value))
    if strategy.storage is None and new.sharding != old.sharding:
        new = jax.device_put(new, old.sharding)  # it was moved, for example to the host's memory
    variable._value = new


def _collect_objects(
    run: ReplicaGroup, outcomes: Sequence[ReplicaResult], refused: list[tuple[str, str, str]]
) -> dict[int, PyTree]:
    """Returns the new values of the NNX Variables that some replica has changed, by leaf."""
    binding = run.binding
    if binding is None:
        return {}
    before = binding.values()
    after = [binding.values_of(x.copies) or [] for x in outcomes]
    new_values = {}
    for i, old in enumerate(before):
        parts = [jax.tree.leaves(x[i]) for x in after]
        entered = [jax.tree.leaves(x.entered[i]) for x in outcomes]
        if all(
            x is y for p, e in zip(parts, entered, strict=True) for x, y in zip(p, e, strict=True)
        ):
            continue
        if binding.variables[i] is None:
            change = f"the array '{binding.name(i)}' was replaced"
            raise ValueError(divergence.describe_structure_change(run.name, change))
        arrays = [
            _combine(run, i, [host_values.fetch(p[j]) for p in parts], refused, is_part)
            for j, is_part in enumerate(open_parts(old)[1])
        ]
        olds, structure = jax.tree.flatten(old)
        placed = [_place(run, x, y) for x, y in zip(arrays, olds, strict=True)]
        new_values[i] = structure.unflatten(placed)
    return new_values


def _combine(
    run: ReplicaGroup, i: int, parts: list[Any], refused: list[tuple[str, str, str]], is_part: bool
) -> Any:
    """Returns the new value of an NNX Variable from its values on all replicas, by its rule."""
    if is_part:  # each replica has a value of its own, and keeps it
        return host_values.stack_values(parts)
    binding, count = run.binding, run.mesh.num_replicas
    assert binding is not None, "it has the Variable"
    rule = None if i in run.not_sums else binding.aggregation(i, dict(run.rules))
    shares = rule is _SUM and count > 1  # each replica has its own share of a sum
    if host_values.are_equal(parts) and not shares:
        return parts[0]
    if rule is _NONE:
        return PerReplica(host_values.stack_values(parts))
    if rule is None:
        remedy = divergence.remedy_of(binding.types[i].__name__)
        refused.append((binding.name(i), _describe_difference(parts), remedy))
        return parts[0]
    if rule is VariableAggregation.ONLY_FIRST_REPLICA:
        return parts[0]
    if isinstance(rule, ReduceOp):
        return (np.max if rule is ReduceOp.MAX else np.min)(np.stack(parts), axis=0)
    dtype = parts[0].dtype
    # As collectives do: 16-bit floats are added up in float32.
    wide = np.float32 if collectives.is_16_bit_float(dtype) else dtype
    total = np.sum(np.stack(parts), axis=0, dtype=wide).astype(dtype)
    mean = ReduceOp.from_variable_aggregation(rule) is ReduceOp.MEAN
    return (total / count).astype(dtype) if mean else total


def _place(run: ReplicaGroup, value: Any, old: object) -> jax.Array | PerReplica:
    """Moves a new value to the place of the old one; to the mesh, if that was elsewhere."""
    if isinstance(value, PerReplica):  # one value per replica from now on
        stacked = host_values.to_array(value.array)
        return PerReplica(jax.device_put(stacked, run.mesh.stacked))
    array = host_values.to_array(value)
    storage = run.strategy.storage
    if storage is not None:
        return storage.place(array)
    return jax.device_put(array, _sharding_of(old, run.mesh))


def _sharding_of(old: object, mesh: ReplicaMesh) -> jax.sharding.Sharding:
    sharding = old.sharding if isinstance(old, jax.Array) else None
    if sharding is not None and sharding.device_set == mesh.device_set:
        return sharding
    return mesh.replicated


def _describe_difference(parts: list[Any]) -> str:
    """Describes the first difference between the values of replicas."""
    hosts = [x.data if isinstance(x, HostKeys) else x for x in parts]
    first = hosts[0]
    for replica, x in enumerate(hosts):
        if x.shape != first.shape:
            return f"it has shape {first.shape} on replica 0, and {x.shape} on replica {replica}"
    differing = [
        # Positions with unequal values, except where both are NaN.
        (replica, np.argwhere((x != first) & ~((x != x) & (first != first))))
        for replica, x in enumerate(hosts)
    ]
    replica, places = next(((r, p) for r, p in differing if len(p)), (0, np.zeros((0, 0), int)))
    if not len(places):
        return "its values differ in the sign of zeros or the bits of NaNs"
    where = tuple(map(int, places[0]))
    at = f" at {list(where)}" if where else ""
    others = format_members("replica", (r for r, p in differing if len(p)))
    return (
        f"replica 0 has {first[where]}{at}, and replica {replica} has {hosts[replica][where]} "
        f"(different from replica 0: {others})"
    )
