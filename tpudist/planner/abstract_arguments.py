"""The arguments of a step without their data, placed on the devices of a plan.

Every array becomes a `jax.ShapeDtypeStruct` with the same partition spec on the mesh of the twin of
a strategy (the same strategy on other devices; see `Strategy.on`). NNX objects are copied, so the
objects of the user do not change.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpudist.array_types import PyTree
from tpudist.context.strategy_base import StrategyBase
from tpudist.input.transfer.to_devices import part_spec
from tpudist.lowering import placement
from tpudist.lowering.abstract_placement import array_on, sharding_on
from tpudist.run.arguments import argument_checks, call_arguments, call_description, flattener
from tpudist.state import nnx_binding, nnx_contents
from tpudist.values.per_replica import PerReplica
from tpudist.xla import descriptions
from tpudist.xla.mesh import ReplicaMesh

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_MAX_NAMES = 3  # of arguments in a note


@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """Argument of `Strategy.plan`: a batch that is split over the replicas of the plan.

    Each replica gets its part, as from a distributed dataset. On every slice the global batch has
    the same size. In contrast, a PerReplica has the same size on each replica.

    Attributes:
        tree: Pytree of `jax.ShapeDtypeStruct`s (or arrays) `[global_batch, ...]`.
    """

    tree: PyTree

    def on(self, mesh: ReplicaMesh, name: str = "the batch") -> PyTree:
        """Returns the batch as a distributed dataset would give it to the replicas of `mesh`.

        Raises:
            ValueError: If a leaf has no rows, or the batch does not split evenly.
            TypeError: If a leaf is not an array.
        """
        sizes = set()
        for x in jax.tree.leaves(self.tree):
            if not isinstance(x, _ARRAYS):
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
        # An uneven batch is an error. A run pads it, so the plan would be of the program for
        # partial batches.
        (size,) = sizes
        rows_per_replica = _rows_per_replica(size, n, name)
        # One replica gets arrays, not a PerReplica.
        rows = None if n == 1 else (rows_per_replica,) * n
        return jax.tree.map(
            lambda x: part_spec(mesh, (rows_per_replica, *x.shape[1:]), x.dtype, rows), self.tree
        )


def _rows_per_replica(global_batch: int, num_replicas: int, name: str) -> int:
    rows_per_replica, left_over = divmod(global_batch, num_replicas)
    if not global_batch:
        raise ValueError(f"'{name}' has no examples. Pass a multiple of {num_replicas} rows.")
    if left_over:
        smaller = rows_per_replica * num_replicas
        larger = smaller + num_replicas
        fits = f"{smaller} or {larger}" if smaller else f"{larger}"
        raise ValueError(
            f"'{name}' is a global batch of {global_batch} examples, which does not split evenly "
            f"over {num_replicas} replicas: {left_over} would be left over. Use a multiple of "
            f"{num_replicas}, such as {fits}."
        )
    return rows_per_replica


@dataclasses.dataclass(frozen=True)
class TwinArguments:
    """Arguments for the twin of a strategy.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        batch_ids: Ids of the abstract arrays that are parts of a batch.
        notes: Differences from the arguments of the user, one sentence each.
    """

    args: tuple
    kwargs: dict[str, Any]
    batch_ids: frozenset[int]
    notes: tuple[str, ...]


def move_arguments(
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    strategy: StrategyBase,
    twin: StrategyBase,
) -> TwinArguments:
    """Returns the arguments of a call of `strategy.run` for a call of its twin.

    Raises:
        TypeError: If an array has a dtype that devices do not support, or is in an object that JAX
            does not flatten.
        ValueError: If a PerReplica has another number of replicas, a batch does not split evenly,
            or an array is split over an axis that the twin does not have.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=flattener.is_leaf)
    # Checked before anything moves: an argument that `run` rejects raises the same error in a plan.
    checked = [x for x in leaves if not isinstance(x, GlobalBatch | PerReplica)]
    kinds = call_arguments.Kinds.of(checked)
    argument_checks.check_leaves(checked, kinds, None, 1, descriptions.name_of(fn))
    names = call_description.names_of_leaves(fn, args, kwargs)
    mover = _Mover(strategy, twin)
    moved = [mover.move(x, name) for x, name in zip(leaves, names, strict=True)]
    # After all leaves: objects stay in the list until now, because they may share Variables, and
    # their copies must share the same ones.
    mover.copy_objects(moved)
    args, kwargs = treedef.unflatten(moved)
    return TwinArguments(tuple(args), kwargs, frozenset(mover.batch_ids), mover.notes)


class _Mover:
    def __init__(self, strategy: StrategyBase, twin: StrategyBase):
        self._strategy, self._mesh = strategy, twin.replica_mesh
        self.batch_ids: list[int] = []
        self._notes: list[str] = []
        self._names_of_unsplit: list[str] = []  # arrays that every replica receives completely

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences from the arguments of the user."""
        n = self._mesh.num_replicas
        # Only from one replica to several is it a likely mistake: on one device, `run` takes an
        # array of all rows as the batch, and here every replica would compute all of it.
        if not self._names_of_unsplit or not self._strategy.num_replicas_in_sync == 1 < n:
            return tuple(self._notes)
        names = ", ".join(self._names_of_unsplit[:_MAX_NAMES])
        names += ", ..." if len(self._names_of_unsplit) > _MAX_NAMES else ""
        return (
            *self._notes,
            f"All {n} replicas receive all rows of {names}. To split a batch over them, wrap it in "
            "tpudist.planner.GlobalBatch.",
        )

    def move(self, x: Any, name: str) -> PyTree:
        if isinstance(x, GlobalBatch):
            batch = x.on(self._mesh, name)
            self._mark_as_batch(batch)
            rows = jax.tree.leaves(x.tree)[0].shape[0]
            n = self._mesh.num_replicas
            split = f"in all, {rows // n} on each of {n} replicas" if n > 1 else "on one replica"
            self._notes.append(f"{name}: {rows} rows {split}.")
            return batch
        if isinstance(x, PerReplica):
            return self._move_per_replica(x, name)
        if isinstance(x, nnx_contents.OBJECT_TYPES):
            return x  # `copy_objects` moves all objects together, because they may share Variables
        if isinstance(x, _ARRAYS):
            self._names_of_unsplit += [name] if x.shape else []
            return array_on(self._mesh, x, name, self._strategy.replica_mesh)
        # Other leaves of the flattener, such as Variables, contain arrays; the rest are Python
        # values.
        return jax.tree.map(self._array_mover(name), x) if flattener.is_leaf(x) else x

    def copy_objects(self, leaves: list[Any]) -> None:
        """Replaces the NNX objects in `leaves` by abstract copies."""
        places = [i for i, x in enumerate(leaves) if isinstance(x, nnx_contents.OBJECT_TYPES)]
        if not places:
            return
        binding = nnx_binding.Binding([leaves[i] for i in places])
        values = [
            jax.tree.map(self._array_mover(binding.name(i)), x)
            for i, x in enumerate(binding.values())
        ]
        for i, x in zip(places, binding.copy_with(values), strict=True):
            leaves[i] = x

    def _array_mover(self, name: str) -> Callable[[object], object]:
        home = self._strategy.replica_mesh

        def move(x: object) -> object:
            return array_on(self._mesh, x, name, home) if isinstance(x, _ARRAYS) else x

        return move

    def _move_per_replica(self, x: PerReplica, name: str) -> PerReplica | jax.ShapeDtypeStruct:
        num_parts = x.array.shape[0]
        num_replicas = self._strategy.num_replicas_in_sync
        num_planned = self._mesh.num_replicas
        if num_parts not in (num_replicas, num_planned):
            raise ValueError(
                f"'{name}' is {x!r}, but the strategy has {num_replicas} replica(s) and the "
                f"devices of the plan have {num_planned}. Distribute it with this strategy, or "
                "pass a tpudist.planner.GlobalBatch."
            )
        if num_parts != num_planned:
            self._notes.append(
                f"{name}: each of {num_planned} replicas receives {list(x.shape)}, as each of "
                f"{num_parts} did."
            )
        shape = (num_planned, *x.shape)
        if not isinstance(x.array, np.ndarray) and isinstance(x.array.sharding, NamedSharding):
            stacked = sharding_on(self._mesh, x.array.sharding, name)
        else:
            stacked = placement.sharding_of_stack(self._mesh, shape, split_rows=x.rows is not None)
        if num_planned == 1:
            # One replica gets arrays without the dim of replicas, as from a distributed dataset.
            single = NamedSharding(self._mesh.mesh, PartitionSpec(*stacked.spec[1:]))
            moved = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=single)
        else:
            # All rows are real, even if this batch was partial: a plan describes the program
            # for complete batches.
            rows = None if x.rows is None else (x.shape[x.dim],) * num_planned
            array = jax.ShapeDtypeStruct(shape, x.dtype, sharding=stacked)
            moved = PerReplica(array, rows, x.dim)
        self._mark_as_batch(moved)
        return moved

    def _mark_as_batch(self, tree: PyTree) -> None:
        # By id: the arrays stay alive in the arguments until the plan is made.
        self.batch_ids += [id(x) for x in jax.tree.leaves(tree)]
