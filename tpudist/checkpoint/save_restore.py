"""Converts objects to the contents of a step (arrays and JSON), and restores objects from a step.

Does not know when to save or where, and in several processes each runs it for itself.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from tpudist.checkpoint import entry_values, not_finite, numbers, restore_match
from tpudist.checkpoint.entries import (
    ARRAY,
    KEY,
    STATE,
    VALUE,
    Entries,
    Entry,
    ValuePath,
    join_path,
)
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.format import ARRAYS, FORMAT, is_ours, read_valid_contents
from tpudist.checkpoint.restore_match import Leaf, Match, RestoreReport, Selection
from tpudist.values import drift
from tpudist.xla.array_attributes import shape_of

# Dtypes of NumPy and of ml_dtypes that TensorStore, Orbax's storage, does not have.
_UNKNOWN_DTYPES = (
    "int1 uint1 uint2 uint4 float8_e4m3 float6_e2m3fn float6_e3m2fn longdouble clongdouble "
    "float96 float128 complex192 complex256"
).split()


def gather(
    found: Entries, step: int, metrics: Mapping[str, float]
) -> tuple[dict[ValuePath, jax.Array | np.ndarray], dict[str, Any]]:
    """Returns the arrays of a step by path, and everything else as JSON; see `format`.

    Raises:
        CheckpointError: If arrays were donated, or have no values yet; names all of them.
        ValueError: If an array differs between replicas since a call that did not reduce it.
        TypeError: If a state is not JSON, or a dtype cannot be stored.
    """
    arrays: dict[ValuePath, jax.Array | np.ndarray] = {}
    leaves: dict[str, dict[str, Any]] = {}
    donated: list[str] = []
    abstract: list[str] = []
    for entry in found.entries:
        # Only process 0 writes the JSON.
        is_needed = not entry.is_shared or jax.process_index() == 0
        value: Any = entry.read() if is_needed else None
        entry = entry.fit(np.shape(value)) if entry.kind == ARRAY else entry
        leaf = {"kind": entry.kind, "shape": list(entry.shape), "dtype": entry.dtype}
        leaves[entry.name] = leaf
        if entry.kind in (VALUE, STATE):
            leaf["value"] = _check_json(entry, value)
            continue
        if isinstance(value, jax.Array) and value.is_deleted():
            donated.append(entry.name)
        elif isinstance(value, jax.ShapeDtypeStruct):
            abstract.append(entry.name)
        elif 0 not in entry.shape:
            drift.check([value], [entry.name], "CheckpointManager.save")
            arrays[entry.path] = _to_storable(entry, value)
            leaf["path"] = list(entry.path)
    if donated:
        raise CheckpointError(
            f"Cannot save step {step}: these arrays were donated to a step or deleted: "
            f"{', '.join(donated)}. Pass the checkpoint the arrays that the step returned, or a "
            f"copy made before that step (copy.deepcopy(model); nnx.clone shares its arrays). Or "
            f"pass RunOptions(donate_state=False) to that step."
        )
    if abstract:
        raise CheckpointError(
            f"Cannot save step {step}: these are shapes without values: {', '.join(abstract)}. "
            f"Restore or create the arrays first."
        )
    return arrays, {
        "format": FORMAT,
        "step": step,
        "time": time.time(),
        "metrics": metrics,
        "leaves": leaves,
        "aliases": found.aliases,
    }


def refuse_not_finite(
    found: Entries,
    arrays: Mapping[ValuePath, jax.Array | np.ndarray],
    step: int,
    describe: Callable[[], str],
) -> None:
    """Raises if arrays of a step contain NaN or infinities.

    Args:
        found: Entries of the step.
        arrays: Path of each array of the step -> the array.
        step: Number of the step.
        describe: Called for the error; returns a sentence that names the checkpoint that remains.

    Raises:
        CheckpointError: If there are such arrays; names them.
    """
    values = {x.name: arrays[x.path] for x in found.entries if x.path in arrays}
    bad = not_finite.find_not_finite(values)
    if bad:
        arrays_contain = "1 array contains" if len(bad) == 1 else f"{len(bad)} arrays contain"
        raise CheckpointError(
            f"Step {step} was not saved: {arrays_contain} NaN or infinities: {', '.join(bad)}. "
            f"{describe()} To save this state anyway, pass allow_nan=True."
        )


def restore(found: Entries, step: int, path: epath.Path, selection: Selection) -> RestoreReport:
    """Restores the selected values of a step into objects.

    Raises:
        CheckpointError: If the step does not match the objects, or cannot be read. The objects are
            unchanged then.
    """
    # Match, read, convert, write: every check that may fail comes before the first write. `write`
    # only records a value; `found.finish()` is the first change of an object.
    item, leaves, aliases = _describe(path)
    match = restore_match.match(found, leaves, aliases, str(path), selection)
    values = _read_values(match, item, leaves, path)
    converted: dict[str, Any] = {}
    for entry, name in match.pairs:
        leaf = leaves[name]
        if numbers.needs_conversion(entry, leaf):
            converted[entry.name] = numbers.convert(entry, leaf, _number_of(leaf, values))
    used: set[str] = set()
    for entry, name in match.pairs:
        leaf = leaves[name]
        if entry.name in converted:
            number = converted[entry.name]
            entry.write(number if entry.kind == VALUE else entry_values.place(entry, number))
        elif entry.kind in (VALUE, STATE):
            entry.write(leaf["value"])
        elif 0 in entry.shape:
            entry.write(entry_values.empty(entry))
        else:
            # Two objects that shared one array when it was saved may be separate now. Each gets an
            # array of its own, because a step may donate one of them.
            value = values[tuple(leaf["path"])]
            entry.write(entry_values.place(entry, value, is_shared=name in used))
            used.add(name)
    found.finish()
    return RestoreReport(
        step,
        str(path),
        tuple(entry.name for entry, _ in match.pairs),
        match.not_restored,
        match.left_in_checkpoint,
        match.cast,
    )


def _read_values(
    match: Match, item: epath.Path, leaves: Mapping[str, Leaf], path: epath.Path
) -> dict[ValuePath, Any]:
    """Reads the arrays of all matched entries. An array without elements is not stored."""
    from tpudist.checkpoint.arrays import read_arrays  # Orbax takes a while to import

    specs: dict[ValuePath, jax.ShapeDtypeStruct] = {}
    for entry, name in match.pairs:
        leaf = leaves[name]
        if leaf["kind"] in (ARRAY, KEY) and 0 not in entry.shape:
            spec = entry_values.target(entry)
            if numbers.needs_conversion(entry, leaf):
                spec = jax.ShapeDtypeStruct((), jnp.dtype(leaf["dtype"]))
            # Several entries may share one stored array. It is read once, as the first of them
            # needs it, and `place` makes copies for the others.
            specs.setdefault(tuple(leaf["path"]), spec)
    try:
        return read_arrays(item, specs)
    except Exception as error:  # Orbax passes on the errors of its readers of JSON and of arrays
        raise CheckpointError(
            f"Cannot read the arrays of the checkpoint {path}, so nothing was restored "
            f"({type(error).__name__}: {error}). If the storage works, the checkpoint is damaged: "
            f"restore another checkpoint."
        ) from error


def _number_of(leaf: Leaf, values: Mapping[ValuePath, Any]) -> Any:
    return leaf["value"] if leaf["kind"] == VALUE else values[tuple(leaf["path"])]


def _describe(path: epath.Path) -> tuple[epath.Path, dict[str, dict[str, Any]], dict[str, str]]:
    """Returns the directory of a step's arrays, its values by name, and their other names."""
    if is_ours(path):
        contents = read_valid_contents(path)
        return path / ARRAYS, contents["leaves"], contents["aliases"]
    from tpudist.checkpoint.arrays import foreign_item  # Orbax takes a while to import

    item, metadata = foreign_item(path)
    leaves = {
        join_path(name): {
            "kind": ARRAY,
            # Orbax's metadata of a scalar has no shape.
            "shape": list(shape_of(x)),
            "dtype": np.dtype(x.dtype).name,
            "path": list(name),
        }
        for name, x in metadata.items()
    }
    return item, leaves, {}


def _to_storable(
    entry: Entry, value: jax.Array | np.ndarray | np.generic
) -> jax.Array | np.ndarray:
    """Returns the array that Orbax stores for a value: random keys as numbers."""
    if entry.kind == KEY and isinstance(value, jax.Array):
        value = jax.random.key_data(value)
    _check_dtype(entry)
    # Orbax expects that the processes share each `jax.Array`. An array that only this process has
    # must be a NumPy array; process 0 writes its own.
    is_local = (
        isinstance(value, jax.Array) and value.is_fully_addressable and jax.process_count() > 1
    )
    return np.asarray(value) if is_local or isinstance(value, np.generic) else value


def _check_dtype(entry: Entry) -> None:
    """Raises `TypeError` if the storage does not have the dtype, such as `uint4`."""
    if entry.kind == ARRAY and entry.dtype in _UNKNOWN_DTYPES:
        raise TypeError(
            f"'{entry.name}' is {entry}, and checkpoints cannot store arrays of dtype "
            f"{entry.dtype}. Use a dtype of 8 to 64 bits, or int4."
        )


def _check_json(entry: Entry, value: object) -> object:
    try:
        restored = json.loads(json.dumps(value))
        # The texts are for NaN, which JSON stores well, but which differs from itself.
        if restored != value and repr(restored) != repr(value):
            raise ValueError("it would not be restored unchanged")
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"get_state() of '{entry.name}' returned {value!r}, which JSON cannot store "
            f"({error}). Use dicts with str keys, lists, str, int, float, bool and None."
        ) from error
    return value
