"""What of a checkpoint goes where: compares it with the objects before anything is read."""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tpudist.checkpoint import entries, numbers
from tpudist.checkpoint.entries import ARRAY, KEY, VALUE, Entry, describe
from tpudist.checkpoint.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class RestoreReport:
    """The result of a restore.

    Attributes:
        step: Number of the checkpoint.
        path: Path of the checkpoint.
        restored: Names of the restored values, as in the objects.
        not_restored: Names of values of the objects that were left unchanged.
        left_in_checkpoint: Names of values of the checkpoint that were not used.
        cast: Names of restored values that were converted to another dtype, with both dtypes.
        skipped: Newer but damaged checkpoints, with their problems.
    """

    step: int
    path: str
    restored: tuple[str, ...]
    not_restored: tuple[str, ...] = ()
    left_in_checkpoint: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"Restored {len(self.restored)} values of step {self.step} from {self.path}."]
        for what, names in (
            ("Damaged, so skipped", self.skipped),
            ("Converted to another dtype", self.cast),
            ("Not restored, left unchanged", self.not_restored),
            ("Only in the checkpoint", self.left_in_checkpoint),
        ):
            if names:
                lines += [f"{what} ({len(names)}):", *(f"  {name}" for name in names)]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Match:
    """Which entry gets which value of the checkpoint."""

    pairs: list[tuple[Entry, str]]
    not_restored: tuple[str, ...]
    left_in_checkpoint: tuple[str, ...]
    cast: tuple[str, ...]


def match(
    found: entries.Entries,
    saved: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[str, str],
    path: str,
    *,
    only: str | type | Sequence[str | type] | None = None,
    exclude: str | type | Sequence[str | type] = (),
    rename: Mapping[str, str] | None = None,
    cast: bool = False,
    partial: bool = False,
) -> Match:
    """Pairs the entries of objects with what is in a checkpoint.

    Args:
        found: The objects.
        saved: What the checkpoint has, by name: `kind`, `shape` and `dtype` of each.
        aliases: Other names in the checkpoint.
        path: Of the checkpoint, for the error.
        only: Which entries to restore; see `CheckpointManager.restore`.
        exclude: Which of them not to.
        rename: From names in the checkpoint to names in the objects.
        cast: Whether arrays may have another dtype.
        partial: Whether to pair the names that both have, if all are to be restored.

    Raises:
        CheckpointError: Something does not fit; lists all of it.
        ValueError: If a pattern and its new name have another number of `*`.
    """
    only = [only] if isinstance(only, str | type) else only
    exclude = [exclude] if isinstance(exclude, str | type) else exclude
    renaming = _Renames(rename or {})
    by_name, ambiguous = _rename_all((*aliases, *saved), renaming, aliases)
    asked = [x for x in found.entries if _is_chosen(x, only, exclude)]
    problems = [
        f"rename: the checkpoint has no such name: {name}" for name in renaming.list_unused()
    ]
    problems += [
        f"the objects have nothing of this {'type' if isinstance(x, type) else 'name'}: {x}"
        for x in (*(only or ()), *exclude)
        if not any(_covers(x, entry) for entry in found.entries)
    ]
    everything = only is None and not exclude
    partial = partial and everything
    pairs, casts, used = [], [], set()
    for entry in asked:
        old = by_name.get(entry.name)
        if entry.name in ambiguous:
            problems.append(f"several names are renamed to {entry.name}: {ambiguous[entry.name]}")
            continue
        if old is None:
            of_replicas = _describe_replicas(entry, by_name, saved)
            if of_replicas or not partial:
                problems.append(of_replicas or f"missing in the checkpoint: {entry}")
            continue
        used.add(old)
        known = saved[old]
        difference = _difference(entry.fit(known["shape"]), known, cast)
        if difference:
            problems.append(difference)
            continue
        pairs.append((entry.fit(known["shape"]), old))
        if known["dtype"] != entry.dtype:
            casts.append(f"{entry.name}: {known['dtype']} to {entry.dtype}")
    left = [
        f"{name} {describe(x['kind'], x['shape'], x['dtype'])}"
        for name, x in saved.items()
        if name not in used
    ]
    if everything and not partial:
        problems += [f"in the checkpoint, but not in the objects: {x}" for x in left]
    if partial and asked and not pairs and not problems:
        problems = [f"no name in common; the checkpoint has: {', '.join(left) or 'nothing'}"]
    if problems:
        listed = "\n".join(f"  {x}" for x in problems)
        raise CheckpointError(
            f"The checkpoint {path} does not match the objects:\n{listed}\nNothing was restored. "
            f"Create objects like the saved ones, or restore a part: only=[...] or exclude=[...] "
            f"with names, patterns or NNX types, rename={{name in the checkpoint: name here}}, "
            f"cast=True for other dtypes."
        )
    chosen = {entry.name for entry, _ in pairs}
    not_restored = tuple(str(x) for x in found.entries if x.name not in chosen)
    return Match(pairs, not_restored, tuple(left), tuple(casts))


def _difference(entry: Entry, known: Mapping[str, Any], cast: bool) -> str | None:
    there = describe(known["kind"], known["shape"], known["dtype"])
    here = describe(entry.kind, entry.shape, entry.dtype)
    if numbers.needs_conversion(entry, known):
        return None
    fits = known["kind"] == entry.kind
    if entry.kind in (ARRAY, KEY):
        fits = fits and tuple(known["shape"]) == entry.shape
    if entry.kind in (ARRAY, KEY, VALUE) and known["dtype"] != entry.dtype:
        fits = fits and cast and entry.kind == ARRAY
    if fits:
        return None
    what = "is another" if there == here else f"is {here} in the objects, {there}"
    return f"{entry.name} {what} in the checkpoint"


def _describe_replicas(
    entry: Entry, by_name: Mapping[str, str], saved: Mapping[str, Mapping[str, Any]]
) -> str | None:
    """What is wrong if the checkpoint has a value of each replica, and the objects one for all."""
    known = saved.get(by_name.get(f"{entry.name}.0", ""))
    if known is None or known["kind"] != entry.kind or known["dtype"] != entry.dtype:
        return None
    if tuple(known["shape"][1:]) != entry.shape or not known["shape"]:
        return None
    n = known["shape"][0]
    return (
        f"{entry} is one value in the objects, but {n} values in the checkpoint. If they belong "
        f"to {n} replicas (aggregation='none'), call the step once with {n} replicas before you "
        f"restore: it creates one value for each replica. Otherwise omit it: "
        f"exclude=['{entry.name}']"
    )


def _is_chosen(
    entry: Entry, only: Sequence[str | type] | None, exclude: Collection[str | type]
) -> bool:
    chosen = only is None or any(_covers(x, entry) for x in only)
    return chosen and not any(_covers(x, entry) for x in exclude)


def _covers(what: str | type, entry: Entry) -> bool:
    if isinstance(what, type):
        return entry.variable_type is not None and issubclass(entry.variable_type, what)
    return _is_below(entry.name, what)


def _is_below(name: str, prefix: str) -> bool:
    exact = _is_exactly_below(name, prefix)
    return exact or ("*" in prefix and _pattern(prefix).fullmatch(name) is not None)


def _is_exactly_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    """Matches a name, or one above it, where each `*` stands for as few characters as possible."""
    parts = [re.escape(part) for part in re.split(r"\*+", text)]
    return re.compile(f"{'(.*?)'.join(parts)}(?P<below>\\..*)?", re.DOTALL)


def _rename_all(
    names: Iterable[str], renaming: "_Renames", aliases: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Under the name it has in the objects: what it is called in the checkpoint.

    A name that is renamed goes before one that has been called so already. The second dict has
    what several are renamed to, with these.
    """
    by_name: dict[str, str] = {}
    renamed: dict[str, str] = {}
    ambiguous: dict[str, str] = {}
    for name in names:
        new, old = renaming(name), aliases.get(name, name)
        if new == name:
            by_name.setdefault(new, old)
            continue
        if aliases.get(other := renamed.setdefault(new, name), other) != old:
            ambiguous[new] = f"{other}, {name}"
        by_name[new] = old
    return by_name, ambiguous


class _Renames:
    """New names for those that begin with one of the old ones; the longest of these counts.

    A `*` in an old name stands for any text, and the one in the new name for the same text. Names
    without it go first.
    """

    def __init__(self, rename: Mapping[str, str]):
        self._rename = sorted(rename.items(), key=lambda pair: ("*" in pair[0], -len(pair[0])))
        self._used: set[str] = set()

    def __call__(self, name: str) -> str:
        for old, new in self._rename:
            if _is_exactly_below(name, old):
                self._used.add(old)
                return new + name[len(old) :]
            found = _pattern(old).fullmatch(name) if "*" in old else None
            if found:
                self._used.add(old)
                return _fill(old, new, found.groups()[:-1]) + (found["below"] or "")
        return name

    def list_unused(self) -> Iterable[str]:
        return [old for old, _ in self._rename if old not in self._used]


def _fill(old: str, new: str, texts: Sequence[str]) -> str:
    parts = re.split(r"\*+", new)
    if len(parts) != len(texts) + 1:
        raise ValueError(
            f"rename={{{old!r}: {new!r}}}: the old name has {len(texts)} '*' and the new name has "
            f"{len(parts) - 1}. Use the same number in both, because each stands for the same "
            f"text."
        )
    return "".join(x for pair in zip(parts, (*texts, ""), strict=True) for x in pair)
