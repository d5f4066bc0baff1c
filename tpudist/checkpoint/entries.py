"""Finds everything in the objects of a checkpoint that is saved, and gives it a name.

A name is a path of attribute names, dict keys and positions, joined by dots: `model.layers.0.w`.
Nothing here reads the contents of an array, so objects whose arrays were donated can be restored.
"""

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike

from tpudist import library_objects
from tpudist.array_types import PyTree
from tpudist.checkpoint.holders import (
    ArrayHolder,
    Container,
    ObjectHolder,
    has_array,
    has_objects,
    has_shared_state,
    has_state,
)
from tpudist.state import nnx_binding, nnx_contents
from tpudist.xla import tree_depth

ValuePath: TypeAlias = tuple[str, ...]
"""Name of a value, in parts."""

ARRAY, KEY, VALUE, STATE = "array", "random key", "value", "state"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One value that is saved.

    Attributes:
        path: Name of the value, in parts.
        kind: `ARRAY`, `KEY` (typed random keys), `VALUE` (a Python number, bool or string) or
            `STATE` (the position of an iterator).
        shape: Shape of an array or of keys. A first dim of -1 means that only the value has the
            number of rows, as in a table that grows.
        dtype: Name of the dtype, of the implementation of the keys, or of the type of the value.
        variable_type: Type of the NNX Variable that contains the value, if any.
        sharding: Placement; None for arrays of the host and for uncommitted arrays.
        on_host: Whether it is a NumPy array.
        is_shared: Whether all processes would read the same value, so that a checkpoint needs it
            from process 0 only, and reading it in all of them costs messages.
        read: Called without arguments; returns the value.
        write: Called with a restored value. It takes effect in `Entries.finish`, after all
            values have been written.
    """

    path: ValuePath
    kind: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    variable_type: type | None = None
    sharding: jax.sharding.Sharding | None = None
    on_host: bool = False
    is_shared: bool = False

    @property
    def name(self) -> str:
        """The path as a text, which identifies the value in messages and in JSON."""
        return join_path(self.path)

    def fit(self, shape: Sequence[int]) -> "Entry":
        """Returns the entry with the number of rows of a value, if its own may be any."""
        if self.shape[:1] != (-1,) or len(shape) != len(self.shape):
            return self
        return dataclasses.replace(self, shape=(shape[0], *self.shape[1:]))

    def __str__(self) -> str:
        return f"{self.name} {describe(self.kind, self.shape, self.dtype)}"


def join_path(path: Iterable[str]) -> str:
    """Returns the name of a path; different paths have different names."""
    return ".".join(_escape(part) for part in path)


def _escape(part: str) -> str:
    # A part becomes the name of a file or of an object in a store, and "." separates parts.
    for char in "%./\\":
        part = part.replace(char, f"%{ord(char):02X}")
    return part or "%"  # an empty part; no other is "%" alone, because each "%" is escaped


def describe(kind: str, shape: Iterable[int], dtype: str) -> str:
    """Returns a short description of a value, such as `float32[3,4]`."""
    if kind in (ARRAY, KEY):
        return f"{'key ' if kind == KEY else ''}{dtype}[{','.join(map(str, shape))}]"
    return dtype


class Entries:
    """The entries of some objects.

    Args:
        objects: NNX objects, Variables, pytrees of arrays and Python values, objects with
            `get_state` and `set_state`, and trees of all of these, by name. None is skipped.
        replace: Called by `finish` with a name and a new object, for each object that is a tree of
            arrays and values.

    Attributes:
        entries: One for each value, in the order of the objects.
        aliases: Other names of a value that several objects share -> the name under which it is
            saved.

    Raises:
        TypeError: If an object is or contains something else; lists all of them.
    """

    def __init__(self, objects: Mapping[str, Any], replace: Callable[[str, Any], None]):
        self.entries: list[Entry] = []
        self.aliases: dict[str, str] = {}
        # id of each holder of an array -> its first name. The list keeps the holders alive: the id
        # of an object that was freed may belong to another one.
        self._seen: dict[int, str] = {}
        self._alive: list[object] = []
        # The calls that `finish` makes, in three phases.
        self._write_states: list[Callable[[], None]] = []
        self._write_values: list[Callable[[], None]] = []
        self._finish_objects: list[Callable[[], None]] = []
        self._unsupported: list[str] = []
        self._outer: list[object] = []  # containers that are being searched, outermost first
        # All objects found so far: the wrapper of a library's object may need another of them.
        self._neighbors: list[Any] = list(objects.values())
        for name, x in objects.items():
            self._add((name,), x, functools.partial(replace, name))
        self._unsupported += _describe_duplicates(x.name for x in self.entries)
        if self._unsupported:
            listed = "\n".join(f"  {line}" for line in self._unsupported)
            raise TypeError(
                f"A checkpoint cannot save these objects:\n{listed}\nIt can save NNX modules, "
                f"optimizers and Rngs, Variables, arrays of numbers, Python ints, floats, bools "
                f"and strings, objects with get_state() and set_state(), models, layers, "
                f"optimizers and metrics of Keras on JAX, and pytrees of these. Pass only such "
                f"objects."
            )

    def finish(self) -> None:
        """Moves the written values into the objects."""
        # Positions first: an iterator may reject its position, and then the arrays are unchanged.
        # Last the objects that need all of their arrays, such as a table on servers.
        for finish in (*self._write_states, *self._write_values, *self._finish_objects):
            finish()

    def _add(self, path: ValuePath, x: object, replace: Callable[[Any], None] | None) -> None:
        if x is None:
            return
        # The order matters. NNX objects come first: an optimizer of tpudist also has objects, which
        # `_add_nnx` adds after its NNX state. An object with both objects and a state is saved by
        # its objects. Anything that is left is a pytree, or is refused.
        if isinstance(x, nnx_contents.OBJECT_TYPES):
            self._add_nnx(path, x)
        elif has_array(x):
            self._add_variable(path, x)
        elif has_objects(x):
            self._add_container(path, x)
        elif has_state(x):
            write = _defer(x.set_state, self._write_states)
            is_shared = has_shared_state(x)
            dtype = type(x).__name__
            self.entries.append(
                Entry(path, STATE, (), dtype, x.get_state, write, is_shared=is_shared)
            )
        elif library_objects.is_known(x):
            opened = library_objects.open_object(x, self._neighbors)
            if opened is None:
                self._refuse(path, x)
            else:
                self._add(path, opened, replace)
        else:
            self._add_leaves(path, x, replace, None)

    def _add_container(self, path: ValuePath, x: ObjectHolder) -> None:
        # A container that two attributes share is searched, and its plain values are saved, twice:
        # a restore sets each attribute.
        if any(x is outer for outer in self._outer):
            return  # a reference to an outer container, whose objects are saved there
        self._outer.append(x)
        objects = x.checkpoint_objects()
        self._neighbors += objects.values()
        for name, inner in objects.items():
            replace = (
                functools.partial(x.replace_object, name) if isinstance(x, Container) else None
            )
            self._add((*path, name), inner, replace)
        self._outer.pop()

    def _add_nnx(self, path: ValuePath, x: nnx_contents.Object) -> None:
        binding = nnx_binding.Binding((x,))
        for index, (variable, value) in enumerate(
            zip(binding.variables, binding.values(), strict=True)
        ):
            # Without the first part, the number of the object in the binding.
            inner = (*path, *map(str, binding.paths[index][1:]))
            if variable is not None and self._is_known(variable, inner):
                continue
            kind = None if variable is None else type(variable)
            replace = functools.partial(binding.write_value, index)
            self._add_leaves(inner, value, replace, kind)
        # An optimizer of tpudist has more objects than its NNX state.
        if has_objects(x):
            for name, inner in x.checkpoint_objects().items():
                self._add((*path, name), inner, None)

    def _add_variable(self, path: ValuePath, variable: ArrayHolder) -> None:
        if self._is_known(variable, path):
            return
        shape, dtype, sharding = variable.checkpoint_spec()
        write = _defer(variable.restore, self._write_values)
        end = getattr(variable, "finish_restore", None)  # optional in `ArrayHolder`
        if end is not None:
            self._finish_objects.append(end)
        read = variable.checkpoint_value
        if sharding is None:
            name = np.dtype(dtype).name
            self.entries.append(Entry(path, ARRAY, shape, name, read, write, on_host=True))
            return
        self._add_array(path, jax.ShapeDtypeStruct(shape, dtype), sharding, read, write)

    def _add_leaves(
        self,
        path: ValuePath,
        tree: PyTree,
        replace: Callable[[Any], None] | None,
        kind: type | None,
    ) -> None:
        tree_depth.check_depth(tree, f"'{join_path(path)}' of the checkpoint", _is_object)
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_object)
        restored = _TreeBeingRestored([x for _, x in flat], treedef, replace)
        for index, (keys, x) in enumerate(flat):
            inner = (*path, *map(key_name, keys))
            read = functools.partial(operator.getitem, restored.leaves, index)
            write = functools.partial(restored.write, index)
            if _is_object(x):
                # It is restored in place, so the tree needs no new leaf.
                self._add(inner, x, None)
            elif isinstance(x, jax.Array):
                sharding = x.sharding if x.committed else None
                self._add_array(inner, x, sharding, read, write, kind)
            elif isinstance(x, jax.ShapeDtypeStruct):
                self._add_array(inner, x, x.sharding, read, write, kind)
            elif isinstance(x, np.ndarray | np.generic) and _has_numbers(x):
                shape, dtype = x.shape, x.dtype.name
                if isinstance(x, np.generic):
                    write = functools.partial(restored.write_scalar, index)
                self.entries.append(
                    Entry(inner, ARRAY, shape, dtype, read, write, kind, on_host=True)
                )
            # NumPy's float64 and str_ are subclasses of Python's types: the branch above has those
            # of numbers, and others are refused.
            elif isinstance(x, bool | int | float | str) and not isinstance(x, np.generic):
                self.entries.append(Entry(inner, VALUE, (), type(x).__name__, read, write, kind))
            else:
                self._refuse(inner, x)
        self._write_values.append(restored.finish)

    def _add_array(
        self,
        path: ValuePath,
        x: jax.Array | jax.ShapeDtypeStruct,
        sharding: jax.sharding.Sharding | None,
        read: Callable[[], Any],
        write: Callable[[Any], None],
        kind: type | None = None,
    ) -> None:
        key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        dtype = _key_impl(x) if key else np.dtype(x.dtype).name
        self.entries.append(
            Entry(path, KEY if key else ARRAY, tuple(x.shape), dtype, read, write, kind, sharding)
        )

    def _refuse(self, path: ValuePath, x: object) -> None:
        kind = f"{type(x).__module__}.{type(x).__name__}"
        dtype = f" of {x.dtype}" if isinstance(x, np.ndarray) else ""
        self._unsupported.append(f"{join_path(path)}: {kind}{dtype}")

    def _is_known(self, x: object, path: ValuePath) -> bool:
        """Whether an object was found before; if so, records its other name."""
        # Wrappers of one Keras variable are created again at each access: the variable counts.
        x = getattr(x, "checkpoint_identity", x)
        known = self._seen.setdefault(id(x), join_path(path))
        self._alive.append(x)
        if known != join_path(path):
            self.aliases[join_path(path)] = known
            return True
        return False


def find_entries(container: Container) -> Entries:
    """Returns the entries of all objects of a container.

    Raises:
        TypeError: Same as in `Entries`.
    """
    return Entries(container.checkpoint_objects(), container.replace_object)


def _has_numbers(x: np.ndarray | np.generic) -> bool:
    return jax.numpy.issubdtype(x.dtype, np.number) or x.dtype == bool


def _key_impl(x: jax.Array | jax.ShapeDtypeStruct) -> str:
    if isinstance(x, jax.Array):
        return str(jax.random.key_impl(x))
    # `key_impl` rejects an abstract key, but accepts the tracer of one.
    names: list[str] = []
    jax.eval_shape(lambda key: names.append(str(jax.random.key_impl(key))), x)
    return names[0]


def _describe_duplicates(names: Iterable[str]) -> list[str]:
    """Returns the problems of names that several objects have: one would overwrite the other."""
    counts = collections.Counter(names)
    return [f"{name}: {n} objects have this name" for name, n in counts.items() if n > 1]


def _defer(write: Callable[[Any], None], later: list[Callable[[], None]]) -> Callable[[Any], None]:
    """Returns a `write` that only records its call in `later`; `Entries.finish` makes it."""
    return lambda value: later.append(functools.partial(write, value))


def _is_object(x: object) -> bool:
    is_nnx = isinstance(x, nnx_contents.OBJECT_TYPES)
    return is_nnx or has_array(x) or has_objects(x) or has_state(x) or library_objects.is_known(x)


def key_name(key: object) -> str:
    """Returns the name of one key of JAX's `KeyPath`."""
    # Each class of keys of JAX has one of these attributes; a user's class may have none.
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


@dataclasses.dataclass
class _TreeBeingRestored:
    """The leaves of a tree that is replaced as a whole, when all of them have been written."""

    leaves: list[Any]
    treedef: jax.tree_util.PyTreeDef
    replace: Callable[[Any], None] | None
    changed: bool = False

    def write(self, index: int, value: object) -> None:
        self.leaves[index] = value
        self.changed = True

    def write_scalar(self, index: int, value: ArrayLike) -> None:
        self.write(index, np.asarray(value)[()])

    def finish(self) -> None:
        if self.changed and self.replace is not None:
            self.replace(self.treedef.unflatten(self.leaves))
