"""Pairs the values of a checkpoint with the values of objects by name, before anything is read."""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

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
        for title, names in (
            ("Damaged, so skipped", self.skipped),
            ("Converted to another dtype", self.cast),
            ("Not restored, left unchanged", self.not_restored),
            ("Only in the checkpoint", self.left_in_checkpoint),
        ):
            if names:
                lines += [f"{title} ({len(names)}):", *(f"  {name}" for name in names)]
        return "\n".join(lines)


Selector: TypeAlias = str | type | Sequence[str | type]
"""Names, patterns with `*`, or types of NNX Variables; see `CheckpointManager.restore`."""

Leaf: TypeAlias = Mapping[str, Any]
"""Description of a stored value: `kind`, `shape` and `dtype`, and its value or its path."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The values to restore, and how names and dtypes may differ.

    Attributes:
        only: Values of the objects to restore; None for all.
        exclude: Values of the objects that are not restored.
        rename: Names or patterns in the checkpoint -> names in the objects.
        cast: Whether arrays may have other dtypes.
        partial: Whether a name may be missing on either side, when everything is restored.
    """

    only: Selector | None = None
    exclude: Selector = ()
    rename: Mapping[str, str] | None = None
    cast: bool = False
    partial: bool = False

    @property
    def is_everything(self) -> bool:
        """Whether to restore all values of the objects."""
        return self.only is None and not self.exclude


@dataclasses.dataclass(frozen=True)
class Match:
    """The result of `match`.

    Attributes:
        pairs: Each entry that is restored, with the name of its value in the checkpoint.
        not_restored: Names of the other entries.
        left_in_checkpoint: Names of the other values of the checkpoint.
        cast: Names of the entries whose values are converted, with both dtypes.
    """

    pairs: list[tuple[Entry, str]]
    not_restored: tuple[str, ...]
    left_in_checkpoint: tuple[str, ...]
    cast: tuple[str, ...]


def match(
    found: entries.Entries,
    saved: Mapping[str, Leaf],
    aliases: Mapping[str, str],
    path: str,
    selection: Selection = Selection(),
) -> Match:
    """Pairs the entries of objects with the values of a checkpoint at `path`.

    `saved` has the description of each value by name, and `aliases` maps other names to these.

    Raises:
        CheckpointError: If anything does not match; lists all differences.
        ValueError: If a pattern and its new name have different numbers of `*`.
    """
    only, exclude = _as_list(selection.only), _as_list(selection.exclude) or ()
    renaming = _Renames(selection.rename or {})
    by_name, ambiguous = _rename_all((*aliases, *saved), renaming, aliases)
    selected = [x for x in found.entries if _is_selected(x, only, exclude)]
    # Rules and selectors that match nothing are errors, because they are usually misspelled.
    problems = renaming.list_problems() + _list_unused([*(only or ()), *exclude], found.entries)
    partial = selection.partial and selection.is_everything
    pairs: list[tuple[Entry, str]] = []
    casts: list[str] = []
    used: set[str] = set()
    for entry in selected:
        name = by_name.get(entry.name)
        if entry.name in ambiguous:
            problems.append(f"several names are renamed to {entry.name}: {ambiguous[entry.name]}")
            continue
        if name is None:
            problems += _describe_missing(entry, by_name, saved, partial)
            continue
        used.add(name)
        leaf = saved[name]
        difference = _difference(entry.fit(leaf["shape"]), leaf, selection.cast)
        if difference:
            problems.append(difference)
            continue
        pairs.append((entry.fit(leaf["shape"]), name))
        if leaf["dtype"] != entry.dtype:
            casts.append(f"{entry.name}: {leaf['dtype']} to {entry.dtype}")
    left = [f"{name} {_describe_leaf(x)}" for name, x in saved.items() if name not in used]
    if selection.is_everything and not partial:
        problems += [f"in the checkpoint, but not in the objects: {x}" for x in left]
    if partial and selected and not pairs and not problems:
        problems = [f"no name in common; the checkpoint has: {', '.join(left) or 'nothing'}"]
    if problems:
        raise _mismatch_error(path, problems)
    restored = {entry.name for entry, _ in pairs}
    not_restored = tuple(str(x) for x in found.entries if x.name not in restored)
    return Match(pairs, not_restored, tuple(left), tuple(casts))


def _describe_leaf(leaf: Leaf) -> str:
    return describe(leaf["kind"], leaf["shape"], leaf["dtype"])


def _describe_missing(
    entry: Entry, by_name: Mapping[str, str], saved: Mapping[str, Leaf], partial: bool
) -> list[str]:
    replicas = _describe_replicas(entry, by_name, saved)
    if replicas:
        return [replicas]
    return [] if partial else [f"missing in the checkpoint: {entry}"]


def _mismatch_error(path: str, problems: Iterable[str]) -> CheckpointError:
    listed = "\n".join(f"  {x}" for x in problems)
    return CheckpointError(
        f"The checkpoint {path} does not match the objects:\n{listed}\nNothing was restored. "
        f"Create objects like the saved ones, or restore a part: only=[...] or exclude=[...] "
        f"with names, patterns or NNX types, rename={{name in the checkpoint: name here}}, "
        f"cast=True for other dtypes."
    )


def _list_unused(selectors: Iterable[str | type], found: Sequence[Entry]) -> list[str]:
    return [
        f"the objects have nothing of this {'type' if isinstance(x, type) else 'name'}: {x}"
        for x in selectors
        if not any(_covers(x, entry) for entry in found)
    ]


def _as_list(selector: Selector | None) -> Sequence[str | type] | None:
    return [selector] if isinstance(selector, str | type) else selector


def _difference(entry: Entry, leaf: Leaf, cast: bool) -> str | None:
    there = _describe_leaf(leaf)
    here = describe(entry.kind, entry.shape, entry.dtype)
    if numbers.needs_conversion(entry, leaf):
        return None  # `numbers` converts, for example, a Python number to an array `[]`
    fits = leaf["kind"] == entry.kind
    if entry.kind in (ARRAY, KEY):
        fits = fits and tuple(leaf["shape"]) == entry.shape
    if entry.kind in (ARRAY, KEY, VALUE) and leaf["dtype"] != entry.dtype:
        fits = fits and cast and entry.kind == ARRAY
    if fits:
        return None
    # Two kinds may have the same short description.
    problem = "is another" if there == here else f"is {here} in the objects, {there}"
    return f"{entry.name} {problem} in the checkpoint"


def _describe_replicas(
    entry: Entry, by_name: Mapping[str, str], saved: Mapping[str, Leaf]
) -> str | None:
    """Describes a value that the checkpoint has once for each replica, and the objects once."""
    # Such values are saved as one array `[replica, ...]` with the name `<name>.0`.
    leaf = saved.get(by_name.get(f"{entry.name}.0", ""))
    if leaf is None or leaf["kind"] != entry.kind or leaf["dtype"] != entry.dtype:
        return None
    if not leaf["shape"] or tuple(leaf["shape"][1:]) != entry.shape:
        return None
    n = leaf["shape"][0]
    return (
        f"{entry} is one value in the objects, but {n} values in the checkpoint. If they belong "
        f"to {n} replicas (aggregation='none'), call the step once with {n} replicas before you "
        f"restore: it creates one value for each replica. Otherwise omit it: "
        f"exclude=['{entry.name}']"
    )


def _is_selected(
    entry: Entry, only: Sequence[str | type] | None, exclude: Collection[str | type]
) -> bool:
    included = only is None or any(_covers(x, entry) for x in only)
    return included and not any(_covers(x, entry) for x in exclude)


def _covers(selector: str | type, entry: Entry) -> bool:
    """Whether an entry is below a name, matches a pattern, or belongs to a type of Variables."""
    if isinstance(selector, type):
        return entry.variable_type is not None and issubclass(entry.variable_type, selector)
    if _is_at_or_below(entry.name, selector):
        return True
    return "*" in selector and _pattern(selector).fullmatch(entry.name) is not None


def _is_at_or_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    """Returns a regex for a name and everything below it; each `*` is as short as possible."""
    parts = [re.escape(part) for part in re.split(r"\*+", text)]
    return re.compile(f"{'(.*?)'.join(parts)}(?P<below>\\..*)?", re.DOTALL)


def _rename_all(
    names: Iterable[str], renaming: "_Renames", aliases: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns new names -> names in `saved`, and ambiguous new names -> the names that share it."""
    # A renamed value has precedence over a value that has this name already in the checkpoint,
    # whichever comes first. Two renamed names conflict, unless they are names of one value.
    by_name: dict[str, str] = {}
    renamed: dict[str, str] = {}
    ambiguous: dict[str, str] = {}
    for name in names:
        new, old = renaming(name), aliases.get(name, name)
        if new == name:
            by_name.setdefault(new, old)
            continue
        first = renamed.setdefault(new, name)
        if aliases.get(first, first) != old:  # two values would get one name
            ambiguous[new] = f"{ambiguous.get(new, first)}, {name}"
        by_name[new] = old
    return by_name, ambiguous


class _Renames:
    """Maps names in the checkpoint to names in the objects, and records which rules were used."""

    def __init__(self, rename: Mapping[str, str]):
        # The first rule that fits wins: names before patterns, and longer ones before shorter ones.
        self._rename = sorted(rename.items(), key=lambda pair: ("*" in pair[0], -len(pair[0])))
        self._used: set[str] = set()

    def __call__(self, name: str) -> str:
        for old, new in self._rename:
            if _is_at_or_below(name, old):
                self._used.add(old)
                return new + name[len(old) :]
            found = _pattern(old).fullmatch(name) if "*" in old else None
            if found:
                self._used.add(old)
                # All groups except the last one, `below`.
                return _fill(old, new, found.groups()[:-1]) + (found["below"] or "")
        return name

    def list_problems(self) -> list[str]:
        """Returns the problems of the rules that have not been used so far."""
        unused = [old for old, _ in self._rename if old not in self._used]
        return [f"rename: the checkpoint has no such name: {name}" for name in unused]


def _fill(old: str, new: str, texts: Sequence[str]) -> str:
    parts = re.split(r"\*+", new)
    if len(parts) != len(texts) + 1:
        raise ValueError(
            f"rename={{{old!r}: {new!r}}}: the old name has {len(texts)} '*' and the new name has "
            f"{len(parts) - 1}. Use the same number in both, because each stands for the same "
            f"text."
        )
    return "".join(x for pair in zip(parts, (*texts, ""), strict=True) for x in pair)
