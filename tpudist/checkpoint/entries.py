"""What is in the objects of a checkpoint: arrays, keys, numbers and positions, each by its name.

Names come from paths: attribute names, dict keys and positions, joined by dots. Nothing here reads
an array's contents, so objects whose arrays have been donated can still be restored.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpudist import library_objects
from tpudist.state import nnx_binding, nnx_contents
from tpudist.xla import tree_depth

Path = tuple[str, ...]

ARRAY, KEY, VALUE, STATE = "array", "random key", "value", "state"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One thing that is saved, and where it is.

    Attributes:
        path: Its name, in parts.
        kind: `ARRAY`, `KEY` (typed random keys), `VALUE` (a Python number, bool or string) or
            `STATE` (the position of an iterator).
        shape: Of an array or of keys; -1 for a number of rows that only the value says.
        dtype: Name of the dtype, of the keys' implementation, or of the value's type.
        variable_type: The type of the NNX Variable that holds it, if one does.
        sharding: Where it lives; None on the host, or on no device in particular.
        on_host: Whether it is a numpy array.
        read: Gives it.
        write: Takes another in its place; in force once all have been written, see `Found.finish`.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    variable_type: type | None = None
    sharding: jax.sharding.Sharding | None = None
    on_host: bool = False

    @property
    def name(self) -> str:
        """The path, for people and for JSON."""
        return join_path(self.path)

    def fit(self, shape: Sequence[int]) -> "Entry":
        """The entry with the rows of a value of this shape, if it may have any number of them."""
        if self.shape[:1] != (-1,) or len(shape) != len(self.shape):
            return self
        return dataclasses.replace(self, shape=(shape[0], *self.shape[1:]))

    def __str__(self) -> str:
        return f"{self.name} {describe(self.kind, self.shape, self.dtype)}"


def join_path(path: Iterable[str]) -> str:
    """The name of a path; different paths have different names."""
    return ".".join(_escape(part) for part in path)


def _escape(part: str) -> str:
    # The parts become names of files and of objects in a store.
    for char in "%./\\":
        part = part.replace(char, f"%{ord(char):02X}")
    return part or "%"


def describe(kind: str, shape: Iterable[int], dtype: str) -> str:
    """What something is, in a few characters: `float32[3,4]`."""
    if kind in (ARRAY, KEY):
        return f"{'key ' if kind == KEY else ''}{dtype}[{','.join(map(str, shape))}]"
    return dtype


class Entries:
    """The entries of some objects.

    Attributes:
        entries: In the order of the objects.
        aliases: The other names of what has several, with the name that it is saved by.
    """

    def __init__(self, objects: Mapping[str, Any], replace: Callable[[str, Any], None]):
        """Looks into `objects`, by name.

        Args:
            objects: NNX objects, Variables, pytrees of arrays and Python values, what has
                `get_state` and `set_state`, and trees of all of these. None is nothing.
            replace: Called by `finish` with the name and the new tree, of trees of arrays and
                values.

        Raises:
            TypeError: An object is, or holds, something that is none of these; names all of them.
        """
        self.entries: list[Entry] = []
        self.aliases: dict[str, str] = {}
        self._seen: dict[int, str] = {}
        self._keep: list[Any] = []  # so that ids stay those of these objects
        self._states: list[Callable[[], None]] = []
        self._finish: list[Callable[[], None]] = []
        self._ends: list[Callable[[], None]] = []
        self._refused: list[str] = []
        self._around: list[Any] = []
        self._neighbors: list[Any] = list(objects.values())
        for name, x in objects.items():
            self._add((name,), x, _ObjectReplacer(replace, name))
        self._refused += _describe_duplicates(x.name for x in self.entries)
        if self._refused:
            listed = "\n".join(f"  {line}" for line in self._refused)
            raise TypeError(
                f"A checkpoint cannot save these objects:\n{listed}\nIt can save NNX modules, "
                f"optimizers and Rngs, Variables, arrays of numbers, Python ints, floats, bools "
                f"and strings, objects with get_state() and set_state(), models, layers, "
                f"optimizers and metrics of Keras on JAX, and pytrees of these. Pass only such "
                f"objects."
            )

    def finish(self) -> None:
        """Puts what has been written where it belongs.

        First the positions, which may be refused: then the arrays are as they were.
        """
        for finish in (*self._states, *self._finish, *self._ends):
            finish()

    def _add(self, path: Path, x: Any, replace: Callable[[Any], None] | None) -> None:
        if x is None:
            return
        if isinstance(x, nnx_contents.OBJECT_TYPES):
            self._add_nnx(path, x)
        elif has_array(x):
            self._add_variable(path, x)
        elif has_objects(x):
            self._add_container(path, x)
        elif has_state(x):
            write = _DeferredWriter(x.set_state, self._states)
            self.entries.append(Entry(path, STATE, (), type(x).__name__, x.get_state, write))
        elif library_objects.is_known(x):
            opened = library_objects.open_object(x, self._neighbors)
            if opened is None:
                self._refuse(path, x)
            else:
                self._add(path, opened, replace)
        else:
            self._add_tree(path, x, replace)

    def _add_container(self, path: Path, x: Any) -> None:
        if any(x is outer for outer in self._around):
            return  # a way back up: it is saved where it was first met
        self._around.append(x)
        found = x.checkpoint_objects()
        self._neighbors += found.values()
        for name, inner in found.items():
            replace = _ObjectReplacer(x.replace_object, name) if isinstance(x, Container) else None
            self._add((*path, name), inner, replace)
        self._around.pop()

    def _add_nnx(self, path: Path, x: Any) -> None:
        binding = nnx_binding.Binding((x,))
        for index, (variable, value) in enumerate(
            zip(binding.variables, binding.values(), strict=True)
        ):
            inner = (*path, *map(str, binding.paths[index][1:]))
            if variable is not None and self._is_known(variable, inner):
                continue
            kind = None if variable is None else type(variable)
            self._add_leaves(inner, value, _NnxWriter(binding, index), kind)
        # Of the type: an `nnx.Rngs` makes up a stream for any attribute that it is asked for.
        if hasattr(type(x), "checkpoint_objects"):
            for name, inner in x.checkpoint_objects().items():
                self._add((*path, name), inner, None)

    def _add_variable(self, path: Path, variable: Any) -> None:
        if self._is_known(variable, path):
            return
        shape, dtype, sharding = variable.checkpoint_spec()
        write = _DeferredWriter(variable.restore, self._finish)
        if hasattr(variable, "finish_restore"):
            self._ends.append(variable.finish_restore)
        read = variable.checkpoint_value
        if sharding is None:
            name = np.dtype(dtype).name
            self.entries.append(Entry(path, ARRAY, shape, name, read, write, on_host=True))
            return
        self._add_array(path, jax.ShapeDtypeStruct(shape, dtype), sharding, read, write)

    def _add_tree(self, path: Path, x: Any, replace: Callable[[Any], None] | None) -> None:
        self._add_leaves(path, x, replace, None)

    def _add_leaves(
        self, path: Path, tree: Any, replace: Callable[[Any], None] | None, kind: type | None
    ) -> None:
        tree_depth.check_depth(tree, f"'{join_path(path)}' of the checkpoint", _is_object)
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_object)
        cell = _Cell([x for _, x in flat], treedef, replace)
        for index, (keys, x) in enumerate(flat):
            inner = (*path, *map(key_name, keys))
            write = _CellWriter(cell, index)
            if _is_object(x):
                self._add(inner, x, None)
            elif isinstance(x, jax.Array):
                sharding = x.sharding if x.committed else None
                self._add_array(inner, x, sharding, _CellReader(cell, index), write, kind)
            elif isinstance(x, jax.ShapeDtypeStruct):
                self._add_array(inner, x, x.sharding, _CellReader(cell, index), write, kind)
            elif isinstance(x, np.ndarray | np.generic) and _has_numbers(x):
                shape, dtype = x.shape, x.dtype.name
                read = _CellReader(cell, index)
                write = _ScalarWriter(cell, index) if isinstance(x, np.generic) else write
                self.entries.append(
                    Entry(inner, ARRAY, shape, dtype, read, write, kind, on_host=True)
                )
            elif isinstance(x, bool | int | float | str) and not isinstance(x, np.generic):
                read = _CellReader(cell, index)
                self.entries.append(Entry(inner, VALUE, (), type(x).__name__, read, write, kind))
            else:
                self._refuse(inner, x)
        self._finish.append(cell.finish)

    def _add_array(self, path: Path, x: Any, sharding, read, write, kind=None) -> None:
        key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        dtype = _key_impl(x) if key else np.dtype(x.dtype).name
        self.entries.append(
            Entry(path, KEY if key else ARRAY, tuple(x.shape), dtype, read, write, kind, sharding)
        )

    def _refuse(self, path: Path, x: Any) -> None:
        kind = f"{type(x).__module__}.{type(x).__name__}"
        dtype = f" of {x.dtype}" if isinstance(x, np.ndarray) else ""
        self._refused.append(f"{join_path(path)}: {kind}{dtype}")

    def _is_known(self, x: Any, path: Path) -> bool:
        x = getattr(x, "checkpoint_identity", x)
        known = self._seen.setdefault(id(x), join_path(path))
        self._keep.append(x)
        if known != join_path(path):
            self.aliases[join_path(path)] = known
            return True
        return False


class Container:
    """What has objects by name, as a `Checkpoint` has."""

    def checkpoint_objects(self) -> dict[str, Any]:
        """The objects, by name."""
        raise TypeError(f"{type(self).__name__} must define checkpoint_objects().")

    def replace_object(self, name: str, x: Any) -> None:
        """Takes another object for this name."""
        setattr(self, name, x)


def find_entries(container: Container) -> Entries:
    """Returns the entries of all objects of a container.

    Raises:
        TypeError: As `Entries`.
    """
    return Entries(container.checkpoint_objects(), container.replace_object)


def has_state(x: Any) -> bool:
    """Whether `x` says and takes its position, as iterators do."""
    return hasattr(type(x), "get_state") and hasattr(type(x), "set_state")


def has_array(x: Any) -> bool:
    """Whether `x` gives and takes one array, as Variables do."""
    return hasattr(type(x), "checkpoint_spec")


def has_objects(x: Any) -> bool:
    """Whether `x` says which objects it has, as containers do and tables of servers."""
    return hasattr(type(x), "checkpoint_objects")


def _has_numbers(x: np.ndarray | np.generic) -> bool:
    return jax.numpy.issubdtype(x.dtype, np.number) or x.dtype == bool


def _key_impl(x: Any) -> str:
    if isinstance(x, jax.Array):
        return str(jax.random.key_impl(x))
    found: list[str] = []
    # Of an abstract key too, which `key_impl` itself refuses.
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), x)
    return found[0]


def _describe_duplicates(names: Iterable[str]) -> list[str]:
    """What is wrong with names that are there several times: one would overwrite the other."""
    counts = collections.Counter(names)
    return [f"{name}: {n} objects have this name" for name, n in counts.items() if n > 1]


def _is_object(x: Any) -> bool:
    is_nnx = isinstance(x, nnx_contents.OBJECT_TYPES)
    return is_nnx or has_array(x) or has_objects(x) or has_state(x) or library_objects.is_known(x)


def key_name(key: Any) -> str:
    """The name of one step of a path in a tree, of JAX's `KeyPath`."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


@dataclasses.dataclass
class _Cell:
    """A tree that is replaced as a whole."""

    leaves: list[Any]
    treedef: Any
    replace: Callable[[Any], None] | None
    changed: bool = False

    def finish(self) -> None:
        if self.changed and self.replace is not None:
            self.replace(self.treedef.unflatten(self.leaves))


@dataclasses.dataclass
class _CellReader:
    cell: _Cell
    index: int

    def __call__(self) -> Any:
        return self.cell.leaves[self.index]


@dataclasses.dataclass
class _CellWriter:
    cell: _Cell
    index: int

    def __call__(self, value: Any) -> None:
        self.cell.leaves[self.index] = value
        self.cell.changed = True


@dataclasses.dataclass
class _ScalarWriter(_CellWriter):
    def __call__(self, value: Any) -> None:
        super().__call__(np.asarray(value)[()])


@dataclasses.dataclass
class _DeferredWriter:
    """Takes a value, and hands it on when all have been taken."""

    hand_on: Callable[[Any], None]
    later: list[Callable[[], None]]

    def __call__(self, value: Any) -> None:
        self.later.append(lambda: self.hand_on(value))


@dataclasses.dataclass
class _ObjectReplacer:
    replace: Callable[[str, Any], None]
    name: str

    def __call__(self, x: Any) -> None:
        self.replace(self.name, x)


@dataclasses.dataclass
class _NnxWriter:
    binding: nnx_binding.Binding
    index: int

    def __call__(self, value: Any) -> None:
        self.binding.write_value(self.index, value)
