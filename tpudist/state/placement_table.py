"""Where a model is: how each of its arrays is split, and what a device holds of it."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from tpudist.display.text_tables import Column, TextTable
from tpudist.state import nnx_contents
from tpudist.state.variable_base import VariableBase
from tpudist.values.per_replica import PerReplica
from tpudist.xla import random_keys
from tpudist.xla.estimate.sizes import format_bytes

# Of a screen: the largest of them are shown, the others are summed up in one.
MAX_ROWS = 40
_COLUMNS = ("leaf", "dtype and shape", "split", Column("bytes per device", is_number=True))


@dataclasses.dataclass(frozen=True)
class PlacedArray:
    """One array of a model.

    Attributes:
        name: Its path.
        shape: Global; of a PerReplica `[num_replicas, ...]`.
        dtype: Its name.
        split: Over which mesh axes its dims are split, or where it is.
        bytes_per_device: What each device holds of it.
        num_devices: How many devices hold a part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: str
    bytes_per_device: int
    num_devices: int


@dataclasses.dataclass(frozen=True)
class PlacementTable:
    """Where the arrays of a model are; printed as a table, and shown as one by notebooks.

    Attributes:
        arrays: All of them, in the order of the model.
    """

    arrays: tuple[PlacedArray, ...]

    @property
    def bytes_per_device(self) -> int:
        """What a device holds of all of them."""
        return sum(x.bytes_per_device for x in self.arrays)

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> TextTable:
        largest = sorted(self.arrays, key=lambda x: -x.bytes_per_device)[:MAX_ROWS]
        shown = [x for x in self.arrays if any(x is y for y in largest)]
        rows = [
            (
                x.name,
                f"{x.dtype}[{','.join(map(str, x.shape))}]",
                x.split,
                format_bytes(x.bytes_per_device),
            )
            for x in shown
        ]
        notes = []
        if rest := len(self.arrays) - len(shown):
            more = self.bytes_per_device - sum(x.bytes_per_device for x in shown)
            notes = [f"and {rest} smaller ones, {format_bytes(more)} per device together"]
        num_devices = max((x.num_devices for x in self.arrays), default=0)
        title = (
            f"{len(self.arrays)} arrays, {format_bytes(self.bytes_per_device)} on each of "
            f"{num_devices} device(s)"
        )
        return TextTable(_COLUMNS, rows, title, notes)


def describe_placement(tree: Any) -> PlacementTable:
    """Where the arrays of a model, an optimizer or any pytree are: a table for people.

    Args:
        tree: NNX objects, Linen's variables or `TrainState`, Variables, PerReplicas, arrays, or
            abstract arrays that know their shardings, as of `Strategy.create_abstract`.
    """
    return PlacementTable(tuple(_place(name, x) for name, x in _arrays_in(tree)))


def _arrays_in(tree: Any) -> Iterator[tuple[str, Any]]:
    def is_leaf(x: Any) -> bool:
        return isinstance(x, (*nnx_contents.OBJECT_TYPES, VariableBase, PerReplica))

    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if isinstance(x, VariableBase):
            yield name or x.name, x._value  # type: ignore[attr-defined]
        elif isinstance(x, PerReplica):
            yield name, x.array
        elif isinstance(x, nnx_contents.OBJECT_TYPES):
            yield from _arrays_of_object(name, x)
        elif hasattr(x, "dtype"):
            yield name, x


def _arrays_of_object(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Of an NNX object; one that is held twice is counted once."""
    seen: set[int] = set()
    for path, x in nnx.iter_graph(value):
        raw = x.get_raw_value() if isinstance(x, nnx.Variable) else x
        for inner, array in jax.tree_util.tree_flatten_with_path(raw)[0]:
            is_array = hasattr(array, "sharding") or isinstance(array, np.ndarray)
            if is_array and id(array) not in seen:
                seen.add(id(array))
                parts = [name, *map(str, path), jax.tree_util.keystr(inner, simple=True)]
                yield ".".join(part for part in parts if part), array


def _place(name: str, x: Any) -> PlacedArray:
    sharding = getattr(x, "sharding", None)
    part = sharding.shard_shape(tuple(x.shape)) if sharding is not None else x.shape
    if sharding is not None:
        split = _describe_sharding(sharding)
    elif isinstance(x, np.ndarray | np.generic):
        split = "in NumPy, on no device"
    else:
        split = "abstract, on no device"
    return PlacedArray(
        name,
        tuple(x.shape),
        str(x.dtype),
        split,
        math.prod(part) * _item_bytes(x),
        len(sharding.device_set) if sharding is not None else 0,
    )


def _item_bytes(x: Any) -> int:
    """The bytes of one element; of a key those of the numbers that it is."""
    if not random_keys.is_key(x):
        return x.dtype.itemsize
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), x.dtype))
    return data.size * data.dtype.itemsize


def _describe_sharding(sharding: Any) -> str:
    kind = sharding.memory_kind or ""
    where = f", in {kind}" if kind.endswith("host") else ""
    if isinstance(sharding, jax.sharding.NamedSharding):
        if sharding.is_fully_replicated:
            return f"whole on each{where}"
        dims = ["-" if part is None else _join(part) for part in sharding.spec]
        return f"[{', '.join(dims)}]{where}"
    if len(sharding.device_set) == 1:
        return f"on {next(iter(sharding.device_set))}{where}"
    return f"{sharding}{where}"


def _join(names: Any) -> str:
    return names if isinstance(names, str) else " x ".join(names)
