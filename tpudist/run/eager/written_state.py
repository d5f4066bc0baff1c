"""State that replicas have changed, each by itself: checked with its values, and written once."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from tpudist.context.protocols import VariableLike
from tpudist.context.strategy_base import StrategyBase
from tpudist.programs import accumulation
from tpudist.reduce_op import ReduceOp, VariableAggregation
from tpudist.run.eager import eager_results, replica_evaluation
from tpudist.run.eager.replica_group import ReplicaGroup
from tpudist.run.outputs import outputs
from tpudist.state import nnx_binding
from tpudist.values.per_replica import PerReplica, open_parts
from tpudist.xla.mesh import ReplicaMesh

_SUM, _NONE = VariableAggregation.SUM, VariableAggregation.NONE


def save(strategy: StrategyBase, binding: nnx_binding.Binding | None) -> list[tuple[Any, Any]]:
    """What Variables and NNX objects hold, for `restore`. Their arrays are not copied."""
    held: list[tuple[Any, Any]] = [(v, v._value) for v in strategy._list_variables()]
    return held + ([(binding, binding.values())] if binding is not None else [])


def restore(saved: list[tuple[Any, Any]]) -> None:
    """Makes them hold it again."""
    for holder, value in saved:
        if isinstance(holder, nnx_binding.Binding):
            pairs = [(v, x) for v, x in zip(holder.variables, value, strict=True) if v is not None]
            nnx_binding.write([v for v, _ in pairs], [x for _, x in pairs])
        else:
            holder._value = value


def write(run: ReplicaGroup, ended: Sequence["eager_results.Ended"]) -> None:
    """Writes what the replicas have changed.

    Raises:
        ValueError: State that they share differs between them.
    """
    refused: list[tuple[str, str, str]] = []
    variables = _collect_variables(run, refused)
    leaves = _collect_objects(run, ended, refused)
    if refused:
        raise ValueError(outputs.describe_divergence(run.name, refused))
    for variable, value in variables.items():
        _set(run.strategy, variable, value)
    if leaves:
        assert run.binding is not None, "they are of its Variables"
        holders = [run.binding.variables[i] for i in leaves]
        nnx_binding.write(holders, list(leaves.values()))


def check_structure(run: ReplicaGroup, ended: Sequence["eager_results.Ended"]) -> None:
    """Raises ValueError if an NNX object has another structure than before on some replica."""
    binding = run.binding
    if binding is None:
        return
    for x in ended:
        values = binding.values_of(x.copies)
        if values is None or jax.tree.structure(values) != open_parts(binding.values())[0]:
            change = binding.describe_changes(x.copies)
            raise ValueError(outputs.describe_structure_change(run.name, change))


class NotSums(Exception):
    """The function does something else than add to sums over examples.

    Attributes:
        leaves: These Variables of NNX's averages, by number.
    """

    def __init__(self, leaves: Collection[int]):
        """Of these."""
        super().__init__(leaves)
        self.leaves = frozenset(leaves)


def watch_sums(run: ReplicaGroup, entered: Sequence[Any]) -> accumulation.Watch | None:
    """Returns what follows the sums over examples that NNX's averages hold; None without any."""
    binding, rules = run.binding, dict(run.rules)
    assert binding is not None, "it has the values"
    sums = {
        i: x
        for i, x in enumerate(entered)
        if binding.is_average(i)
        and i not in run.not_sums
        and binding.aggregation(i, rules) is _SUM
        and isinstance(x, jax.Array)
    }
    return accumulation.Watch(sums) if sums else None


def check_sums(run: ReplicaGroup, ended: Sequence["eager_results.Ended"]) -> None:
    """Raises NotSums if a replica does something else than add to one."""
    found: set[int] = set()
    for replica, x in enumerate(ended):
        watch = run.frames[replica].evaluation.watch
        if watch is not None:
            assert run.binding is not None, "it has the sums"
            values = run.binding.values_of(x.copies)
            assert values is not None, "`check_structure` has seen to it"
            found |= watch.find_replaced(dict(enumerate(values)))
    if found:
        raise NotSums(found)


def write_variables(run: ReplicaGroup) -> None:
    """Writes what was assigned to Variables so far, before all replicas are one for a while."""
    refused: list[tuple[str, str, str]] = []
    variables = _collect_variables(run, refused)
    if refused:
        raise ValueError(outputs.describe_divergence(run.name, refused))
    for variable, value in variables.items():
        _set(run.strategy, variable, value)


def _collect_variables(run: ReplicaGroup, refused: list[tuple[str, str, str]]) -> dict[Any, Any]:
    """The new host values of the Variables that some replica has assigned."""
    frames = [run.frames[i] for i in range(run.mesh.num_replicas)]
    found = {}
    for variable in dict.fromkeys(v for frame in frames for v in frame.written):
        parts = [frame.fetch(variable) for frame in frames]
        if variable.on_read:
            found[variable] = replica_evaluation.stack_values(parts)
        elif replica_evaluation.are_equal(parts):
            found[variable] = parts[0]
        else:
            what = f"Variable '{variable.name}'"
            refused.append((what, _describe_difference(parts), outputs.VARIABLE_REMEDY))
    for frame in frames:
        frame.give_up()
    return found


def _set(strategy: StrategyBase, variable: VariableLike, value: Any) -> None:
    old = variable._value
    new = strategy._place_variable(variable, replica_evaluation.to_array(value))
    if strategy.storage is None and new.sharding != old.sharding:
        new = jax.device_put(new, old.sharding)  # where it was moved to, such as the host's memory
    variable._value = new


def _collect_objects(
    run: ReplicaGroup, ended: Sequence["eager_results.Ended"], refused: list[tuple[str, str, str]]
) -> dict[int, Any]:
    """The new values of those NNX Variables that some replica has changed, by number."""
    binding = run.binding
    if binding is None:
        return {}
    before = binding.values()
    after = [binding.values_of(x.copies) for x in ended]
    found = {}
    for i, old in enumerate(before):
        parts = [jax.tree.leaves(x[i]) for x in after]  # type: ignore[index]
        given = [jax.tree.leaves(x.entered[i]) for x in ended]
        if all(
            x is y for p, g in zip(parts, given, strict=True) for x, y in zip(p, g, strict=True)
        ):
            continue
        if binding.variables[i] is None:
            change = f"the array '{binding.name(i)}' was replaced"
            raise ValueError(outputs.describe_structure_change(run.name, change))
        arrays = [
            _combine(run, i, [replica_evaluation.fetch(p[j]) for p in parts], refused, is_part)
            for j, is_part in enumerate(open_parts(old)[1])
        ]
        olds, structure = jax.tree.flatten(old)
        placed = [_place(run, x, y) for x, y in zip(arrays, olds, strict=True)]
        found[i] = structure.unflatten(placed)
    return found


def _combine(
    run: ReplicaGroup, i: int, parts: list[Any], refused: list[tuple[str, str, str]], is_part: bool
) -> Any:
    """What becomes of an NNX Variable's values on all replicas, by its rule."""
    if is_part:  # each replica has its own, and keeps it
        return replica_evaluation.stack_values(parts)
    binding, count = run.binding, run.mesh.num_replicas
    assert binding is not None, "it has the Variable"
    rule = None if i in run.not_sums else binding.aggregation(i, dict(run.rules))
    shares = rule is _SUM and count > 1  # each replica holds its own share of a sum
    if replica_evaluation.are_equal(parts) and not shares:
        return parts[0]
    if rule is _NONE:
        return PerReplica(replica_evaluation.stack_values(parts))
    if rule is None:
        remedy = outputs.remedy_of(binding.types[i].__name__)
        refused.append((binding.name(i), _describe_difference(parts), remedy))
        return parts[0]
    if rule is VariableAggregation.ONLY_FIRST_REPLICA:
        return parts[0]
    if isinstance(rule, ReduceOp):
        return (np.max if rule is ReduceOp.MAX else np.min)(np.stack(parts), axis=0)
    total = np.sum(np.stack(parts), axis=0, dtype=parts[0].dtype)
    mean = ReduceOp.from_variable_aggregation(rule) is ReduceOp.MEAN
    return (total / count).astype(parts[0].dtype) if mean else total


def _place(run: ReplicaGroup, value: Any, old: Any) -> Any:
    """A new value where the old one was; on the mesh, if that was elsewhere."""
    if isinstance(value, PerReplica):  # one for each replica from now on
        stacked = replica_evaluation.to_array(value.array)
        return PerReplica(jax.device_put(stacked, run.mesh.stacked))
    array = replica_evaluation.to_array(value)
    storage = run.strategy.storage
    if storage is not None:
        return storage.place(array)
    return jax.device_put(array, _sharding_of(old, run.mesh))


def _sharding_of(old: Any, mesh: ReplicaMesh) -> Any:
    sharding = getattr(old, "sharding", None)
    on_mesh = sharding is not None and sharding.device_set == mesh.device_set
    return sharding if on_mesh else mesh.replicated


def _describe_difference(parts: list[Any]) -> str:
    """Where the values of replicas differ first, in words."""
    hosts = [x.data if isinstance(x, replica_evaluation.HostKeys) else x for x in parts]
    first = hosts[0]
    for replica, x in enumerate(hosts):
        if x.shape != first.shape:
            return f"it has shape {first.shape} on replica 0, and {x.shape} on replica {replica}"
    differing = [
        (replica, np.argwhere((x != first) & ~((x != x) & (first != first))))
        for replica, x in enumerate(hosts)
    ]
    replica, places = next(((r, p) for r, p in differing if len(p)), (0, np.zeros((0, 0), int)))
    if not len(places):
        return "its values differ in the sign of zeros or the bits of NaNs"
    where = tuple(map(int, places[0]))
    at = f" at {list(where)}" if where else ""
    others = [str(r) for r, p in differing if len(p)]
    return (
        f"replica 0 has {first[where]}{at}, and replica {replica} has {hosts[replica][where]} "
        f"(replicas that differ from replica 0: {', '.join(others)})"
    )
