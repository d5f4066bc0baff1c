"""The arguments of a step with other rows: equal on all replicas, on one device, or partial."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpudist.lowering import placement
from tpudist.lowering.array_copies import fetch, put
from tpudist.run.arguments import call_arguments, flattener
from tpudist.state import nnx_binding, nnx_contents
from tpudist.values.per_replica import PerReplica, open_parts
from tpudist.xla import random_keys
from tpudist.xla.mesh import ReplicaMesh

Change = Callable[[Any], Any]
"""Called with an array, or with random keys; returns the array to use."""


class Rows(enum.Enum):
    """The rows of a batch that one device gets."""

    ALL = "the rows of all replicas"
    FIRST = "the rows of the first replica"
    COPIES = "the rows of the first replica, once for each replica"


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """One batch in host memory.

    Attributes:
        rows: The rows of all replicas along `dim`, without padding.
        rows_per_replica: Number of rows on each replica, padding included.
        dim: The dim of the rows.
        counts: Number of real rows on each replica.
    """

    rows: np.ndarray
    rows_per_replica: int
    dim: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, x: PerReplica) -> "HostBatch":
        """Fetches the rows of all replicas."""
        stacked, counts = fetch(x.array), x.rows
        assert counts is not None, "it is a batch"
        parts = [
            part.take(range(count), x.dim) for part, count in zip(stacked, counts, strict=True)
        ]
        return cls(np.concatenate(parts, x.dim), x.shape[x.dim], x.dim, counts)

    def parts(self) -> list[np.ndarray]:
        """Returns the rows of each replica."""
        return np.split(self.rows, np.cumsum(self.counts)[:-1], self.dim)

    def first(self, count: int) -> np.ndarray:
        """Returns the first `count` rows."""
        return self.rows.take(range(count), self.dim)

    def on_replicas(self, mesh: ReplicaMesh, parts: Sequence[np.ndarray]) -> PerReplica:
        """Returns a batch of these parts, padded to the rows that each replica has."""
        counts = tuple(part.shape[self.dim] for part in parts)
        padded = [_pad(parts[i], self.dim, self.rows_per_replica) for i in mesh.local_replicas]
        array = placement.stack(mesh, np.stack(padded), split_rows=self.dim == 0)
        return PerReplica(array, counts, self.dim)

    def copies(self, mesh: ReplicaMesh) -> PerReplica:
        """Returns a batch in which all replicas have the first rows."""
        return self.on_replicas(mesh, [self.first(self.rows_per_replica)] * mesh.num_replicas)

    def exchange(self, mesh: ReplicaMesh) -> PerReplica:
        """Returns a batch whose rows are exchanged between replicas. Each keeps its position."""
        # Row k of replica i comes from replica (i + k) % n. So every replica gets a mixture of the
        # rows of all, each at its old position: a reduction over all rows keeps its value, and a
        # nonlinear operation on the rows of one replica does not.
        n, rows = mesh.num_replicas, range(self.rows_per_replica)
        parts = [
            self.rows.take([(i + k) % n * self.rows_per_replica + k for k in rows], self.dim)
            for i in range(n)
        ]
        return self.on_replicas(mesh, parts)

    def split(self, mesh: ReplicaMesh, counts: Sequence[int]) -> PerReplica:
        """Returns a batch of the first rows. Replica i has `counts[i]` of them."""
        ends = np.cumsum((0, *counts))
        parts = [
            self.rows.take(range(start, end), self.dim)
            for start, end in zip(ends, ends[1:], strict=False)
        ]
        return self.on_replicas(mesh, parts)


def _pad(part: np.ndarray, dim: int, size: int) -> np.ndarray:
    missing = size - part.shape[dim]
    if not missing:
        return part
    row_shape = (*part.shape[:dim], 1, *part.shape[dim + 1 :])
    row = part.take([0], dim) if part.shape[dim] else np.zeros_like(part, shape=row_shape)
    return np.concatenate([part, *[row] * missing], dim)


class Arguments:
    """The arguments of one call, as replicas and one device get them.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        mesh: The mesh of the call.
        mesh_of_one: The mesh of one device.

    Attributes:
        batches: The batches, by number of the leaf.
        own: The other values with a part for each replica, by number of the leaf.

    Raises:
        ValueError: If an NNX container holds a value for each replica.
    """

    def __init__(
        self, args: tuple, kwargs: dict[str, Any], mesh: ReplicaMesh, mesh_of_one: ReplicaMesh
    ):
        self._leaves, self._structure = jax.tree.flatten((args, kwargs), is_leaf=flattener.is_leaf)
        self._mesh, self._mesh_of_one = mesh, mesh_of_one
        parts = {i: x for i, x in enumerate(self._leaves) if isinstance(x, PerReplica)}
        self.batches = {
            i: HostBatch.of(x) for i, x in parts.items() if x.rows is not None and not x.other_rows
        }
        self.own = {i: x for i, x in parts.items() if i not in self.batches}
        self._objects = [
            i for i, x in enumerate(self._leaves) if isinstance(x, nnx_contents.OBJECT_TYPES)
        ]
        objects = nnx_binding.Binding([self._leaves[i] for i in self._objects])
        states = [self._leaves[i] for i in call_arguments.Kinds.of(self._leaves).states]
        if any(open_parts([objects.values(), states])[1]):
            raise ValueError(
                "Strategy.verify received an NNX container that holds one value for each replica, "
                "which cannot exist on one device. Verify the step before it has local state, or "
                "pass that state in a dict or a list."
            )

    @property
    def min_rows_per_replica(self) -> int:
        """The smallest number of rows that a replica has of a batch; 0 without batches."""
        return min((x.rows_per_replica for x in self.batches.values()), default=0)

    def names_of_equal_batches(self) -> str:
        """Returns the names of the batches if each replica has the same rows; else nothing."""
        parts = {i: x.parts() for i, x in self.batches.items()}
        parts |= {
            i: [*fetch(x.array)] for i, x in self.own.items() if not random_keys.is_key(x.array)
        }
        parts = {i: x for i, x in parts.items() if x[0].ndim}
        if not all(np.array_equal(y, x[0]) for x in parts.values() for y in x[1:]):
            return ""
        # Parts in which all numbers are equal, such as masks, do not show that rows are shared.
        if not any((x[0] != x[0].flat[0]).any() for x in parts.values() if x[0].size):
            return ""
        paths = jax.tree_util.tree_flatten_with_path(
            self._structure.unflatten(self._leaves), is_leaf=flattener.is_leaf
        )[0]
        names = [jax.tree_util.keystr(paths[i][0][1:]) for i in parts]
        return ", ".join(f"argument {name}" for name in names)

    @property
    def is_partial(self) -> bool:
        """Whether a batch has other numbers of real rows on some replicas."""
        return any(set(x.counts) != {x.rows_per_replica} for x in self.batches.values())

    @property
    def can_exchange(self) -> bool:
        """Whether rows that belong together stay so if replicas exchange rows at each position.

        All batches must have the same number of rows, more than one, on each replica.
        """
        counts = {count for x in self.batches.values() for count in (x.rows_per_replica, *x.counts)}
        return len(counts) == 1 and min(counts) > 1

    def cut(self, rows_per_replica: int) -> None:
        """Reduces the full batches to `rows_per_replica` rows of each replica."""
        n = self._mesh.num_replicas
        for i, x in self.batches.items():
            if x.rows_per_replica > rows_per_replica:
                rows = x.rows.take(range(rows_per_replica * n), x.dim)
                counts = (rows_per_replica,) * n
                self.batches[i] = HostBatch(rows, rows_per_replica, x.dim, counts)

    def fill(self) -> None:
        """Changes partial batches to full ones, with as many rows as all replicas can have."""
        n = self._mesh.num_replicas
        for i, x in self.batches.items():
            if set(x.counts) != {x.rows_per_replica} and x.rows.shape[x.dim]:
                each = max(x.rows.shape[x.dim] // n, 1)
                row_shape = (*x.rows.shape[: x.dim], *x.rows.shape[x.dim + 1 :])
                # `resize` repeats the rows if there are fewer rows than replicas.
                rows = np.resize(np.moveaxis(x.rows, x.dim, 0), (each * n, *row_shape))
                self.batches[i] = HostBatch(np.moveaxis(rows, 0, x.dim), each, x.dim, (each,) * n)

    # On the replicas.

    def as_passed(self) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments with the rows that the batches have."""
        return self._with({i: x.split(self._mesh, x.counts) for i, x in self.batches.items()})

    def copies(self) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments, in which all replicas have the rows of the first one."""
        new: dict[int, Any] = {i: x.copies(self._mesh) for i, x in self.batches.items()}
        new |= {i: _part_of_first(self._mesh, x) for i, x in self.own.items()}
        return self._with(new)

    def exchange(self) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments, in which rows of full batches are exchanged between replicas."""
        return self._with({i: x.exchange(self._mesh) for i, x in self.batches.items()})

    def split(self, counts: Callable[[int], Sequence[int]]) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments with `counts(rows)` rows on the replicas."""
        return self._with(
            {i: x.split(self._mesh, counts(x.rows_per_replica)) for i, x in self.batches.items()}
        )

    # On other devices.

    def on_one_device(self, change: Change, rows: Rows) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments for one device.

        Args:
            change: Called with each array; returns the array to use.
            rows: The rows of each batch.
        """

        def take(x: HostBatch) -> np.ndarray:
            if rows is Rows.ALL:
                return x.rows
            copies = self._mesh.num_replicas if rows is Rows.COPIES else 1
            return np.concatenate([x.first(x.rows_per_replica)] * copies, x.dim)

        new = {i: change(put(self._mesh_of_one, take(x))) for i, x in self.batches.items()}
        new |= {i: change(put(self._mesh_of_one, fetch(x.array)[0])) for i, x in self.own.items()}
        return self._move_to_one_device(new, change)

    def on_one_device_by_replicas(
        self, mesh: ReplicaMesh, *, copies: bool
    ) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments for replicas that share one device.

        Args:
            mesh: The replicas.
            copies: Whether all replicas get the rows of the first one.
        """
        n = mesh.num_replicas
        new: dict[int, Any] = {
            i: x.copies(mesh) if copies else x.split(mesh, x.counts)
            for i, x in self.batches.items()
        }
        for i, x in self.own.items():
            parts = fetch(x.array)
            parts = np.repeat(parts[:1], n, 0) if copies else parts
            new[i] = PerReplica(jax.device_put(parts, mesh.stacked), x.rows, x.dim, x.other_rows)
        return self._move_to_one_device(new, lambda x: x)

    def _move_to_one_device(
        self, new: dict[int, Any], change: Change
    ) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments on one device, with `new` values in the place of batches."""

        def move(x: object) -> object:
            return change(put(self._mesh_of_one, x)) if isinstance(x, jax.Array | np.ndarray) else x

        leaves = dict(new)
        for i, x in enumerate(self._leaves):
            if i not in leaves and i not in self._objects:
                leaves[i] = jax.tree.map(move, x) if flattener.is_leaf(x) else move(x)
        if self._objects:
            # One binding of all objects: a Variable that several of them share stays one.
            binding = nnx_binding.Binding([self._leaves[i] for i in self._objects])
            values = [jax.tree.map(move, x) for x in binding.values()]
            leaves |= dict(zip(self._objects, binding.copy_with(values), strict=True))
        return self._with(leaves)

    def _with(self, new: dict[int, Any]) -> tuple[tuple, dict[str, Any]]:
        leaves = [new.get(i, x) for i, x in enumerate(self._leaves)]
        args, kwargs = self._structure.unflatten(leaves)
        return args, kwargs


def _part_of_first(mesh: ReplicaMesh, x: PerReplica) -> PerReplica:
    if random_keys.is_key(x.array):
        first = jnp.broadcast_to(x.array[:1], x.array.shape)
        return PerReplica(first, x.rows, x.dim, x.other_rows)
    part = fetch(x.array)[:1]
    local = np.repeat(part, len(mesh.local_replicas), 0)
    return PerReplica(placement.stack(mesh, local), x.rows, x.dim, x.other_rows)
