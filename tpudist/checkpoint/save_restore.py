"""What a step holds besides its arrays, as JSON, and the way from objects to a step and back."""

import json
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from tpudist.checkpoint import entry_values, not_finite, numbers, restore_match
from tpudist.checkpoint.entries import ARRAY, KEY, STATE, VALUE, Entries, Entry, Path, join_path
from tpudist.checkpoint.errors import CheckpointError
from tpudist.checkpoint.format import ARRAYS, FORMAT, is_ours, read_valid_contents
from tpudist.checkpoint.restore_match import RestoreReport
from tpudist.values import drift

_UNKNOWN_DTYPES = (
    "int1 uint1 uint2 uint4 float8_e4m3 float6_e2m3fn float6_e3m2fn longdouble clongdouble "
    "float96 float128 complex192 complex256"
).split()


def gather(
    found: Entries, step: int, metrics: Mapping[str, float]
) -> tuple[dict[Path, Any], dict[str, Any]]:
    """The arrays of a step by path, and all else, as JSON has it.

    Raises:
        CheckpointError: Arrays have been donated, or have no values yet; names all.
        ValueError: An array differs between replicas since a call that did not reduce it.
        TypeError: A state is no JSON, or a dtype cannot be stored.
    """
    arrays: dict[tuple[str, ...], Any] = {}
    leaves: dict[str, dict[str, Any]] = {}
    gone, abstract = [], []
    for entry in found.entries:
        value = entry.read()
        entry = entry.fit(np.shape(value)) if entry.kind == ARRAY else entry
        leaf = {"kind": entry.kind, "shape": list(entry.shape), "dtype": entry.dtype}
        leaves[entry.name] = leaf
        if entry.kind in (VALUE, STATE):
            leaf["value"] = _check_json(entry, value)
            continue
        if isinstance(value, jax.Array) and value.is_deleted():
            gone.append(entry.name)
        elif isinstance(value, jax.ShapeDtypeStruct):
            abstract.append(entry.name)
        elif 0 not in entry.shape:
            drift.check([value], [entry.name], "CheckpointManager.save")
            arrays[entry.path] = _to_storable(entry, value)
            leaf["path"] = list(entry.path)
    if gone:
        raise CheckpointError(
            f"Cannot save step {step}: these arrays were donated to a step or deleted: "
            f"{', '.join(gone)}. Pass the checkpoint the arrays that the step returned, or a copy "
            f"made before that step (copy.deepcopy(model); nnx.clone shares its arrays). Or pass "
            f"RunOptions(donate_state=False) to that step."
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


def refuse_not_finite(found: Entries, arrays: Mapping[Path, Any], step: int, good: str) -> None:
    """Refuses to save a step with NaN or infinities.

    Raises:
        CheckpointError: Names the arrays, and says `good`: which checkpoint there is.
    """
    values = {x.name: arrays[x.path] for x in found.entries if x.path in arrays}
    bad = not_finite.find_not_finite(values)
    if bad:
        arrays_hold = "1 array contains" if len(bad) == 1 else f"{len(bad)} arrays contain"
        raise CheckpointError(
            f"Step {step} was not saved: {arrays_hold} NaN or infinities: {', '.join(bad)}. "
            f"{good} To save this state anyway, pass allow_nan=True."
        )


def restore(found: Entries, step: int, path: epath.Path, **how: Any) -> RestoreReport:
    """Restores what `matching.match`, which takes `how`, pairs; all of it is read before.

    Raises:
        CheckpointError: The step does not fit the objects.
    """
    from tpudist.checkpoint.arrays import read_arrays  # Orbax takes a while to import

    item, leaves, aliases = _describe(path)
    match = restore_match.match(found, leaves, aliases, str(path), **how)
    wanted: dict[Path, Any] = {}
    for entry, name in match.pairs:
        leaf = leaves[name]
        if leaf["kind"] in (ARRAY, KEY) and 0 not in entry.shape:
            target = entry_values.target(entry)
            if numbers.needs_conversion(entry, leaf):
                target = jax.ShapeDtypeStruct((), jnp.dtype(leaf["dtype"]))
            wanted.setdefault(tuple(leaf["path"]), target)
    try:
        values = read_arrays(item, wanted)
    except Exception as error:  # Orbax raises whatever its reader of JSON or of arrays does
        raise CheckpointError(
            f"Cannot read the arrays of the checkpoint {path}, so nothing was restored "
            f"({type(error).__name__}: {error}). If the storage works, the checkpoint is damaged: "
            f"restore another checkpoint."
        ) from error
    converted = {  # before anything is written: a number may not fit
        entry.name: numbers.convert(entry, leaf, _number_of(leaf, values))
        for entry, leaf in ((entry, leaves[name]) for entry, name in match.pairs)
        if numbers.needs_conversion(entry, leaf)
    }
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
            # What was one array when it was saved may be two now, which are donated by themselves.
            again = name in used
            used.add(name)
            entry.write(entry_values.place(entry, values[tuple(leaf["path"])], again=again))
    found.finish()
    return RestoreReport(
        step,
        str(path),
        tuple(entry.name for entry, _ in match.pairs),
        match.not_restored,
        match.left_in_checkpoint,
        match.cast,
    )


def _number_of(leaf: Mapping[str, Any], values: Mapping[Path, Any]) -> Any:
    return leaf["value"] if leaf["kind"] == VALUE else values[tuple(leaf["path"])]


def _describe(path: epath.Path) -> tuple[epath.Path, dict[str, dict[str, Any]], dict[str, str]]:
    """What a step holds: the path of its arrays, what there is by name, and other names."""
    if is_ours(path):
        contents = read_valid_contents(path)
        return path / ARRAYS, contents["leaves"], contents["aliases"]
    from tpudist.checkpoint.arrays import foreign_item  # Orbax takes a while to import

    item, found = foreign_item(path)
    leaves = {
        join_path(name): {
            "kind": ARRAY,
            "shape": list(getattr(x, "shape", ())),
            "dtype": np.dtype(x.dtype).name,
            "path": list(name),
        }
        for name, x in found.items()
    }
    return item, leaves, {}


def _to_storable(entry: Entry, value: Any) -> Any:
    """What Orbax gets: keys as numbers, and what only this process sees as a numpy array."""
    if entry.kind == KEY:
        value = jax.random.key_data(value)
    _check_dtype(entry)
    if isinstance(value, jax.Array) and value.is_fully_addressable and jax.process_count() > 1:
        return np.asarray(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def _check_dtype(entry: Entry) -> None:
    """Refuses a dtype that the store does not have.

    Raises:
        TypeError: Such as `uint4`.
    """
    if entry.kind == ARRAY and entry.dtype in _UNKNOWN_DTYPES:
        raise TypeError(
            f"'{entry.name}' is {entry}, and checkpoints cannot store arrays of dtype "
            f"{entry.dtype}. Use a dtype of 8 to 64 bits, or int4."
        )


def _check_json(entry: Entry, value: Any) -> Any:
    try:
        if json.loads(json.dumps(value)) != value:
            raise ValueError("it would not be restored unchanged")
    except (TypeError, ValueError) as error:
        if value == value:
            raise TypeError(
                f"get_state() of '{entry.name}' returned {value!r}, which JSON cannot store "
                f"({error}). Use dicts with str keys, lists, str, int, float, bool and None."
            ) from error
    return value
