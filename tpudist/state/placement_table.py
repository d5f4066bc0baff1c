"""Table of the placement of a model: the split of each array, and its bytes per device."""

import dataclasses
import math
from collections.abc import Iterator
from typing import TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.core import ShapedArray, Tracer

from tpudist.array_types import PyTree, Shape
from tpudist.display.text_tables import Column, TextTable
from tpudist.state import nnx_contents
from tpudist.state.variable_base import VariableBase
from tpudist.values.per_replica import PerReplica
from tpudist.xla import random_keys
from tpudist.xla.array_attributes import has_dtype, sharding_of
from tpudist.xla.estimate.sizes import format_bytes

# About one screen. A larger model shows its largest arrays, and one line about the others.
_MAX_ROWS = 40
_COLUMNS = ("leaf", "dtype and shape", "split", Column("bytes per device", is_number=True))

_Array: TypeAlias = jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic


@dataclasses.dataclass(frozen=True)
class PlacedArray:
    """Placement of one array of a model.

    Attributes:
        name: Path of the array.
        shape: Global shape; for a PerReplica `[num_replicas, ...]`.
        dtype: Name of the dtype.
        split: Mesh axes that split its dims, or the memory that contains it, as text.
        bytes_per_device: Bytes of the part on each device.
        num_devices: Number of devices with a part.
    """

    name: str
    shape: Shape
    dtype: str
    split: str
    bytes_per_device: int
    num_devices: int


@dataclasses.dataclass(frozen=True)
class PlacementTable:
    """Placement of the arrays of a model. Prints as a table, also in notebooks.

    Attributes:
        arrays: All arrays, in the order of the model.
    """

    arrays: tuple[PlacedArray, ...]

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all arrays on each device."""
        return sum(x.bytes_per_device for x in self.arrays)

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> TextTable:
        largest = sorted(self.arrays, key=lambda x: -x.bytes_per_device)[:_MAX_ROWS]
        # In the order of the model, and by identity: equal arrays are different rows.
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


def describe_placement(tree: PyTree) -> PlacementTable:
    """Returns a table of the placement of a model, an optimizer or any other pytree.

    Args:
        tree: NNX objects, Linen's variables or `TrainState`, Variables, PerReplicas, arrays, or
            abstract arrays with shardings, such as the result of `Strategy.create_abstract`.
    """
    return PlacementTable(tuple(_describe_array(name, x) for name, x in _arrays_in(tree)))


def _arrays_in(tree: PyTree) -> Iterator[tuple[str, _Array]]:
    def is_leaf(x: object) -> bool:
        return isinstance(x, (*nnx_contents.OBJECT_TYPES, VariableBase, PerReplica))

    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if isinstance(x, VariableBase):
            yield name or x.name, x._value
        elif isinstance(x, PerReplica):
            yield name, x.array
        elif isinstance(x, nnx_contents.OBJECT_TYPES):
            yield from _arrays_of_object(name, x)
        elif has_dtype(x):  # an array of any library
            yield name, x


def _arrays_of_object(name: str, value: nnx_contents.Object) -> Iterator[tuple[str, _Array]]:
    """Yields the arrays of an NNX object, an array with several references once."""
    seen: set[int] = set()
    for path, x in nnx.iter_graph(value):
        raw = x.get_raw_value() if isinstance(x, nnx.Variable) else x
        for inner, array in jax.tree_util.tree_flatten_with_path(raw)[0]:
            is_array = isinstance(array, jax.Array | jax.ShapeDtypeStruct | np.ndarray)
            if is_array and id(array) not in seen:
                seen.add(id(array))
                parts = [name, *map(str, path), jax.tree_util.keystr(inner, simple=True)]
                yield ".".join(part for part in parts if part), array


def _describe_array(name: str, x: _Array) -> PlacedArray:
    # NumPy's arrays, tracers and arrays of other libraries have no sharding.
    sharding = sharding_of(x)
    if sharding is None:
        split = _describe_unplaced(x)
        part, num_devices = tuple(x.shape), 0
    else:
        split = _describe_sharding(sharding)
        part, num_devices = sharding.shard_shape(tuple(x.shape)), len(sharding.device_set)
    num_bytes = math.prod(part) * _item_bytes(x)
    return PlacedArray(name, tuple(x.shape), str(x.dtype), split, num_bytes, num_devices)


def _describe_unplaced(x: _Array) -> str:
    if isinstance(x, np.ndarray | np.generic):
        return "in NumPy, on no device"
    if isinstance(x, Tracer | ShapedArray | jax.ShapeDtypeStruct):
        return "abstract, on no device"
    return "in another library"


def _item_bytes(x: _Array) -> int:
    if not random_keys.is_key(x):
        return x.dtype.itemsize
    # An element of a key array is several integers, which depend on JAX's generator.
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), x.dtype))
    return data.size * data.dtype.itemsize


def _describe_sharding(sharding: jax.sharding.Sharding) -> str:
    kind = sharding.memory_kind or ""
    memory = f", in {kind}" if kind.endswith("host") else ""
    if isinstance(sharding, jax.sharding.NamedSharding):
        if sharding.is_fully_replicated:
            return f"whole on each{memory}"
        dims = ["-" if part is None else _join(part) for part in sharding.spec]
        return f"[{', '.join(dims)}]{memory}"
    if len(sharding.device_set) == 1:
        return f"on {next(iter(sharding.device_set))}{memory}"
    return f"{sharding}{memory}"


def _join(names: str | tuple[str, ...]) -> str:
    return names if isinstance(names, str) else " x ".join(names)
