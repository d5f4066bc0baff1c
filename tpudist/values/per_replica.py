"""Values in a program of replicas: equal everywhere, or one per replica.

A value that is equal on every replica is a plain `jax.Array`. A value that differs is a
`PerReplica`: one stacked array `[num_replicas, ...]`, sharded so that each replica has its part.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tpudist import context
from tpudist.array_types import PyTree
from tpudist.context.weak_identity import WeakIdentityDict
from tpudist.lowering import placement, replica_parts
from tpudist.options.member_names import format_counts
from tpudist.values.array_like import apply_operator
from tpudist.xla import collectives
from tpudist.xla.array_attributes import has_dtype
from tpudist.xla.mesh import mesh_of_mirrored
from tpudist.xla.traces import is_traced

# The key of the dict in which a replica function returned an array, by array, for messages.
_returned_keys = WeakIdentityDict()


class _OrMirrored(type):
    """Makes mirrored arrays instances of a class, and excludes Variables with one copy."""

    # Only for `isinstance`: `is_distributed` uses `issubclass`, which excludes plain arrays.
    def __instancecheck__(cls, instance: object) -> bool:
        if super().__instancecheck__(instance):
            # A Variable with one copy is an instance of the classes below `DistributedValues` only.
            # `state.variable.Variable` has the attribute; other instances do not.
            return cls is not DistributedValues or not getattr(instance, "has_one_copy", False)
        if cls not in (DistributedValues, Mirrored) or not isinstance(instance, jax.Array):
            return False
        return not is_traced(instance) and mesh_of_mirrored(instance) is not None


class DistributedValues(metaclass=_OrMirrored):
    """A PerReplica, a Variable, or a mirrored array; for `isinstance`.

    A Variable with one copy (one replica, or central storage) is an ordinary variable, and not an
    instance. Matches `tf.distribute.DistributedValues`.
    """


class Mirrored(DistributedValues):
    """A value that is equal on every replica; for `isinstance`, without instances of its own.

    Such values are plain arrays that are replicated over a mesh of several replicas: the results of
    `reduce`, and results of a replica function that are equal everywhere. TensorFlow's Mirrored is
    a container of one tensor per replica.
    """


def is_distributed(x: object) -> bool:
    """Returns whether `x` is a PerReplica or a Variable, and not a plain array."""
    return issubclass(type(x), DistributedValues)


@jax.tree_util.register_pytree_node_class
class PerReplica(DistributedValues):
    """A value that differs between replicas.

    A pytree node around one array, so it passes through `jax.jit`, `jax.tree.map` and checkpoints.
    It is not an array: how the parts combine is for you to say, with `strategy.reduce`,
    `strategy.gather` or `strategy.experimental_local_results`. In a replica function each replica
    sees its own part.

    Matches `tf.distribute`'s PerReplica. A partial batch is padded; `rows` counts its real rows.

    Attributes:
        array: `[num_replicas, ...]`, sharded over the replicas.
        rows: Number of real leading rows of each replica's part, one number per replica, if dim 0
            of the parts counts examples; otherwise None.
        dim: The dim of the parts that `rows` counts, if it is not dim 0.
        other_rows: Other dims that also count examples (as in a matrix of all pairs), each with its
            rows: `((dim, rows), ...)`.
    """

    __slots__ = ("array", "dim", "other_rows", "rows")

    def __init__(
        self,
        array: jax.Array | jax.ShapeDtypeStruct,
        rows: tuple[int, ...] | None = None,
        dim: int = 0,
        other_rows: tuple[tuple[int, tuple[int, ...]], ...] = (),
    ):
        self.array: Any = array  # JAX also rebuilds pytrees with shapes, specs and other leaves
        self.rows, self.dim, self.other_rows = rows, dim, other_rows

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the stacked array as child; `rows` and their dims are structure.

        In a replica function that captures it, the child is this replica's part.
        """
        local = self._part_in_replica()
        # Structure is hashed and compared: under `jax.jit`, another number of rows makes another
        # program.
        structure = (self.rows, self.dim, self.other_rows)
        return (self.array if local is None else local,), structure

    @classmethod
    def tree_unflatten(cls, structure, children):
        """Inverts `tree_flatten`."""
        return cls(children[0], *structure)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one replica's part, padding included."""
        return tuple(self.array.shape[1:])

    @property
    def is_padded(self) -> bool:
        """Whether the part of some replica contains padding."""
        return any(real != self.shape[dim] for dim, rows in self.extents.items() for real in rows)

    @property
    def extents(self) -> dict[int, tuple[int, ...]]:
        """The dims that count examples, each with the number of real rows on each replica."""
        return {} if self.rows is None else {self.dim: self.rows, **dict(self.other_rows)}

    @property
    def dtype(self):
        """Dtype of the parts."""
        return self.array.dtype

    @property
    def values(self) -> tuple[Any, ...]:
        """The parts of this process's replicas, in order, padding included.

        In a trace, the parts of all replicas: an all-gather.
        """
        local = self._part_in_any_trace()
        if local is not None:
            return tuple(collectives.all_gather(local[None], 0))
        mesh = placement.mesh_of(self.array)
        return tuple(replica_parts.component(mesh, self.array, i) for i in mesh.local_replicas)

    def _part_in_any_trace(self) -> Any:
        """Returns this replica's part in a trace; None outside of all traces."""
        # In a trace the array is an argument, and already this replica's part. A concrete array was
        # captured by the traced function, and the frame finds this replica's part of it.
        if is_traced(self.array):
            return self.array
        frame = context.current().frame
        if frame is None or not isinstance(self.array, jax.Array):
            return None
        return frame.capture(self)

    def _part_in_replica(self) -> Any:
        """Returns the replica's own part in a replica function; None elsewhere."""
        mode = context.current()
        return (
            None
            if mode.frame is None or mode.replica_context is None
            else self._part_in_any_trace()
        )

    def __repr__(self) -> str:
        rows = "" if self.rows is None else f", rows={format_counts(self.rows)}"
        rows += f" of dim {self.dim}" if self.dim else ""
        array = self.array
        if not has_dtype(array):  # a leaf that JAX has put in its place
            return f"PerReplica({array!r}{rows})"
        shape = ",".join(map(str, self.shape))
        return f"PerReplica({array.dtype}[{shape}] on each of {array.shape[0]} replicas{rows})"

    def _refusal(self) -> TypeError:
        return TypeError(
            f"{self!r} was used as one array, but every replica has its own. Combine the parts "
            "with strategy.reduce('sum', value, axis=None), concatenate them with "
            "strategy.gather(value, axis=0), or read the parts of this process with "
            f"strategy.experimental_local_results(value).{self._advice()}"
        )

    def _advice(self) -> str:
        """Returns the option of `run` that reduces state returned under a name; else nothing."""
        if (name := _returned_keys.get(self.array)) is None:
            return ""
        return (
            f" The function returned it as '{name}'. run(..., options="
            f"tpudist.RunOptions(aggregation={{{name!r}: 'mean'}})), or 'sum', returns one array."
        )

    def _part_or_raise(self) -> Any:
        """Returns this replica's part in a replica function; elsewhere raises `TypeError`."""
        local = self._part_in_replica()
        if local is None:
            raise self._refusal()
        return local

    def __jax_array__(self) -> Any:
        return self._part_or_raise()

    def __getitem__(self, key: object) -> Any:
        """Returns an item of this replica's part; with `...`, as for an NNX Variable, all parts."""
        if key is ... and self._part_in_replica() is None:
            return self
        return self._part_or_raise()[key]

    def __setitem__(self, key: object, value: "ArrayLike | PerReplica") -> None:
        """Replaces all parts, by a PerReplica or by one value for all: `variable[...] = 0`.

        Raises:
            TypeError: If `key` is not `...`, or in a replica function.
        """
        array = self.array
        if key is not ... or is_traced(array) or context.current().frame is not None:
            raise TypeError(
                f"{self!r} does not support assignment at {key!r}. Outside of replica functions, "
                "you can replace all parts: variable[...] = value."
            )
        if isinstance(value, PerReplica):
            self.array, self.rows = value.array, value.rows
            self.dim, self.other_rows = value.dim, value.other_rows
            return
        every = jnp.broadcast_to(jnp.asarray(value, array.dtype), array.shape)
        self.array = jax.device_put(every, array.sharding)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of this replica's part (`sum`, ...) in a replica function."""
        # Own attributes that are not set yet, as while it is unpickled, must not be looked up in
        # the part: that would recurse.
        is_own = name.startswith("_") or name in ("array", "rows", "dim", "other_rows")
        if not is_own and (local := self._part_in_replica()) is not None:
            return getattr(local, name)
        raise AttributeError(
            f"A {type(self).__name__} has no attribute '{name}': every replica has its own array. "
            f"Use it in a replica function, or read it with strategy.experimental_local_results."
            f"{self._advice()}"
        )


def _forward(name: str) -> None:
    """Adds the operator `name`, which applies to this replica's part."""

    def operator(self, *others):
        others = [x._part_or_raise() if isinstance(x, PerReplica) else x for x in others]
        return apply_operator(self._part_or_raise(), name, others)

    operator.__name__ = name
    setattr(PerReplica, name, operator)


# Not `__eq__`, `__ne__` and `__hash__`, so that a PerReplica can be compared and found by identity.
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    _forward(f"__{_name}__")
    _forward(f"__r{_name}__")
for _name in ("lt", "le", "gt", "ge", "neg", "abs", "len", "iter"):
    _forward(f"__{_name}__")
for _name in ("array", "float", "int", "bool", "index", "complex"):
    _forward(f"__{_name}__")


@jax.tree_util.register_pytree_node_class
class LocalPart(PerReplica):
    """A PerReplica in a trace in cross-replica context.

    Its rows are known to the frame only, so its structure as a pytree is empty.

    Args:
        array: This replica's own part, traced.
    """

    __slots__ = ()

    def __init__(self, array: jax.Array):
        super().__init__(array)

    def _part_in_any_trace(self) -> Any:
        return self.array

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the array as child."""
        return (self.array,), ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one replica's part."""
        return tuple(self.array.shape)

    def __repr__(self) -> str:
        return f"PerReplica({self.array.dtype}{list(self.shape)} on each replica, being traced)"


def record_key(value: PerReplica, key: str) -> None:
    """Records the key of the dict in which a replica function returned `value`."""
    _returned_keys.setdefault(value.array, key)


def open_parts(tree: PyTree) -> tuple[Any, list[bool]]:
    """Returns the structure of `tree` with each PerReplica as a leaf, and whether each leaf is one.

    The leaves have the number and order of `jax.tree.leaves(tree)`.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_per_replica)
    return structure, list(map(is_per_replica, leaves))


def is_per_replica(x: object) -> bool:
    """Returns whether `x` is a PerReplica."""
    return isinstance(x, PerReplica)


def local_part(value: object) -> Any:
    """Returns this replica's part of a PerReplica in a trace; any other value as it is."""
    return value._part_in_any_trace() if isinstance(value, PerReplica) else value
