"""Checks names and numbers of options before they are read, for errors of one short line."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from tpudist.cli.errors import WrongUse


def check_names(args: Sequence[str], command: str, options: type, takes_program: bool) -> None:
    """Checks that the command has each option that a command line names.

    Args:
        args: Command line, up to the program of a command that takes one.
        command: Name of the subcommand.
        options: Dataclass of its options.
        takes_program: Whether an unknown option may be meant for the program. Without a program,
            an unknown option is only reported here if a known option has a similar name.

    Raises:
        WrongUse: If an option is unknown.
    """
    fields = dict(_fields(options))
    flags = [f"--no-{name[2:]}" for name, kind in fields.items() if kind is bool]
    for word in args:
        name = word.partition("=")[0].replace("_", "-")
        if not name.startswith("--") or name in ("--", "--help", *fields, *flags):
            continue
        near = difflib.get_close_matches(name, [*fields, *flags], n=1, cutoff=0.6)
        meant = f" Did you mean {near[0]}?" if near else ""
        if takes_program:
            raise WrongUse(
                f"{command} has no option {name}.{meant} Options of the program follow its name. "
                f"The options of {command} are {', '.join(fields)}."
            )
        if near:
            raise WrongUse(
                f"{command} has no option {name}.{meant} tpudist {command} --help lists all "
                f"options."
            )


def check_numbers(args: Sequence[str], options: type) -> None:
    """Checks that the values of options that take one number are numbers.

    Raises:
        WrongUse: If a value is not a number.
    """
    fields = dict(_fields(options))
    for word, following in itertools.pairwise([*args, ""]):
        name, has_value, value = word.partition("=")
        kind = fields.get(name.replace("_", "-"))
        value = value if has_value else following
        if kind not in (int, float) or value in ("", "None") or value.startswith("--"):
            continue
        try:
            kind(value)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise WrongUse(f"{name} {value}: must be {what}.") from None


def _fields(options: type) -> Iterator[tuple[str, Any]]:
    """Yields the name of each option and its type, of `T | None` the type T."""
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _fields(typing.cast(type, kind))
            continue
        if isinstance(kind, types.UnionType):
            kinds = [x for x in typing.get_args(kind) if x is not type(None)]
            kind = kinds[0] if len(kinds) == 1 else kind
        if field.name not in ("script", "arguments"):
            yield f"--{field.name.replace('_', '-')}", kind
