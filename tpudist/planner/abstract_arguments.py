"""The arguments of a step without their data, as they would be on other devices.

Every array becomes a `jax.ShapeDtypeStruct` with the same partition spec on the mesh of the twin of
a strategy; see `Strategy.on`. NNX objects are copied, so that the user's own stay as they are.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.input.transfer.to_devices import part_spec
from tpudist.lowering import placement
from tpudist.lowering.abstract_placement import array_on, sharding_on
from tpudist.run.arguments import call_arguments
from tpudist.state import nnx_binding, nnx_contents
from tpudist.values.per_replica import PerReplica
from tpudist.xla.mesh import ReplicaMesh

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """An argument of `Strategy.plan`: a batch to be split over however many replicas there will be.

    Each replica gets its part, as of a distributed dataset. The global batch stays the same on all
    slices; a PerReplica stays the same on each replica.

    Attributes:
        tree: Pytree of `jax.ShapeDtypeStruct`s (or arrays) `[global_batch, ...]`.
    """

    tree: PyTree

    def on(self, mesh: ReplicaMesh, name: str = "the batch") -> PyTree:
        """The same for the replicas of `mesh`: what a distributed dataset would give them.

        Raises:
            ValueError: A leaf has no rows, or the batch does not split evenly.
            TypeError: A leaf is no array.
        """
        sizes = set()
        for x in jax.tree.leaves(self.tree):
            if not hasattr(x, "shape") or not hasattr(x, "dtype"):
                raise TypeError(
                    f"GlobalBatch for '{name}' holds a {type(x).__name__}. Pass arrays or "
                    "jax.ShapeDtypeStructs [global_batch, ...]."
                )
            sizes.add(x.shape[0] if x.shape else None)
        if len(sizes) != 1 or None in sizes:
            shapes = ", ".join(str(list(x.shape)) for x in jax.tree.leaves(self.tree)) or "none"
            raise ValueError(
                f"GlobalBatch for '{name}' has arrays of shapes {shapes}. All must count the same "
                f"examples along dim 0."
            )
        n = mesh.num_replicas
        (size,) = sizes
        each = _rows_of_each(size, n, name)
        rows = None if n == 1 else (each,) * n
        return jax.tree.map(
            lambda x: part_spec(mesh, (each, *x.shape[1:]), x.dtype, rows), self.tree
        )


def _rows_of_each(global_batch: int, num_replicas: int, name: str) -> int:
    each, left_over = divmod(global_batch, num_replicas)
    if left_over or not each:
        smaller, larger = each * num_replicas, (each + 1) * num_replicas
        fits = f"{smaller} or {larger}" if smaller else f"{larger}"
        raise ValueError(
            f"'{name}' is a global batch of {global_batch} examples, which does not split evenly "
            f"over {num_replicas} replicas: {left_over} would be left over. Use a multiple of "
            f"{num_replicas}, such as {fits}."
        )
    return each


@dataclasses.dataclass(frozen=True)
class TwinArguments:
    """Arguments as they are on other devices.

    Attributes:
        args: The positional ones.
        kwargs: The others.
        batches: Ids of the abstract arrays among them that are parts of a batch.
        notes: What is not as it was, one sentence each.
    """

    args: tuple
    kwargs: dict[str, Any]
    batches: frozenset[int]
    notes: tuple[str, ...]


def move_arguments(
    args: tuple,
    kwargs: dict[str, Any],
    names: Sequence[str],
    strategy: StrategyBase,
    twin: StrategyBase,
    function_name: str = "fn",
) -> TwinArguments:
    """The arguments of a call of `strategy.run`, as a call of its twin takes them.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        names: What each flat argument is called; see `call_description.names_of_leaves`.
        strategy: What they were made for.
        twin: The strategy that they are wanted for.
        function_name: Whose arguments they are, for messages.

    Raises:
        TypeError: An array that no device can hold, or one that JAX cannot see.
        ValueError: A PerReplica of another number of replicas, a batch that does not divide, an
            axis that replicas do not have.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=call_arguments.is_leaf)
    looked_at = [x for x in leaves if not isinstance(x, GlobalBatch | PerReplica)]
    call_arguments.check_leaves(
        looked_at, call_arguments.Kinds.of(looked_at), None, 1, function_name
    )
    mover = _Mover(strategy, twin)
    made = [mover.leaf(x, name) for x, name in zip(leaves, names, strict=True)]
    mover.copy_objects(made)
    args, kwargs = treedef.unflatten(made)
    return TwinArguments(tuple(args), kwargs, frozenset(mover.batches), mover.notes)


class _Mover:
    """Moves one argument after the other."""

    def __init__(self, strategy: StrategyBase, twin: StrategyBase):
        self._strategy, self._mesh = strategy, twin.replica_mesh
        self.batches: list[int] = []
        self._notes: list[str] = []
        self._whole: list[str] = []  # arguments of which every replica gets all

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not as it was."""
        n = self._mesh.num_replicas
        if not self._whole or not self._strategy.num_replicas_in_sync == 1 < n:
            return tuple(self._notes)
        names = ", ".join(self._whole[:3]) + (", ..." if len(self._whole) > 3 else "")
        return (
            *self._notes,
            f"All {n} replicas receive all rows of {names}. To split a batch over them, wrap it in "
            "tpudist.planner.GlobalBatch.",
        )

    def leaf(self, x: Any, name: str) -> Any:
        if isinstance(x, GlobalBatch):
            batch = x.on(self._mesh, name)
            self._is_batch(batch)
            rows = jax.tree.leaves(x.tree)[0].shape[0]
            n = self._mesh.num_replicas
            each = f"in all, {rows // n} on each of {n} replicas" if n > 1 else "on one replica"
            self._notes.append(f"{name}: {rows} rows {each}.")
            return batch
        if isinstance(x, PerReplica):
            return self._part(x, name)
        if isinstance(x, nnx_contents.OBJECT_TYPES):
            return x  # all of them together, in `copy_objects`: they may share Variables
        if isinstance(x, _ARRAYS):
            self._whole += [name] if x.shape else []
            return array_on(self._mesh, x, name, self._strategy.replica_mesh)
        return jax.tree.map(self._maybe_array(name), x) if call_arguments.is_leaf(x) else x

    def copy_objects(self, leaves: list[Any]) -> None:
        """Replaces the NNX objects among `leaves` by abstract copies, in place."""
        where = [i for i, x in enumerate(leaves) if isinstance(x, nnx_contents.OBJECT_TYPES)]
        if not where:
            return
        binding = nnx_binding.Binding([leaves[i] for i in where])
        values = [
            jax.tree.map(self._maybe_array(binding.name(i)), x)
            for i, x in enumerate(binding.values())
        ]
        for i, x in zip(where, binding.copy_with(values), strict=True):
            leaves[i] = x

    def _maybe_array(self, name: str) -> Any:
        home = self._strategy.replica_mesh

        def move(x: Any) -> Any:
            return array_on(self._mesh, x, name, home) if isinstance(x, _ARRAYS) else x

        return move

    def _part(self, x: PerReplica, name: str) -> Any:
        parts, old, n = (
            x.array.shape[0],
            self._strategy.num_replicas_in_sync,
            self._mesh.num_replicas,
        )
        if parts not in (old, n):
            raise ValueError(
                f"'{name}' is {x!r}, but the strategy has {old} replica(s) and the devices of the "
                f"plan have {n}. Distribute it with this strategy, or pass a "
                "tpudist.planner.GlobalBatch."
            )
        if parts != n:
            self._notes.append(
                f"{name}: each of {n} replicas receives {list(x.shape)}, as each of {parts} did."
            )
        shape = (n, *x.shape)
        sharding = getattr(x.array, "sharding", None)
        if isinstance(sharding, NamedSharding):
            where = sharding_on(self._mesh, sharding, name)
        else:
            where = placement.sharding_of_stack(self._mesh, shape, split_rows=x.rows is not None)
        if n == 1:  # as of a distributed dataset
            whole = NamedSharding(self._mesh.mesh, PartitionSpec(*where.spec[1:]))
            made = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
        else:
            rows = None if x.rows is None else (x.shape[x.dim],) * n
            array = jax.ShapeDtypeStruct(shape, x.dtype, sharding=where)
            made = PerReplica(array, rows, x.dim)
        self._is_batch(made)
        return made

    def _is_batch(self, tree: PyTree) -> None:
        self.batches += [id(x) for x in jax.tree.leaves(tree)]
