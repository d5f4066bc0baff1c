"""Checks of the names and numbers of options, with errors of one line; tyro prints a page."""

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
    # tyro gives a boolean that is True by default (`cache`) the second name --no-cache.
    flags = [f"--no-{name[2:]}" for name, field_type in fields.items() if field_type is bool]
    for word in args:
        # A word that begins with -- is an option here even if it is the value of another one: no
        # option has values that begin so. Single letters, such as -n, are left to tyro.
        name = word.partition("=")[0].replace("_", "-")
        if not name.startswith("--") or name in ("--", "--help", *fields, *flags):
            continue
        near = difflib.get_close_matches(name, [*fields, *flags], n=1, cutoff=0.6)
        suggestion = f" Did you mean {near[0]}?" if near else ""
        if takes_program:
            raise WrongUse(
                f"{command} has no option {name}.{suggestion} Options of the program follow its "
                f"name. The options of {command} are {', '.join(fields)}."
            )
        if near:
            raise WrongUse(
                f"{command} has no option {name}.{suggestion} tpudist {command} --help lists all "
                f"options."
            )


def check_numbers(args: Sequence[str], options: type) -> None:
    """Checks that the values of options that take one number are numbers.

    Raises:
        WrongUse: If a value is not a number.
    """
    fields = dict(_fields(options))
    # The value is after "=" or is the next word; "" stands for the word after the last one.
    for word, following in itertools.pairwise([*args, ""]):
        name, has_value, value = word.partition("=")
        field_type = fields.get(name.replace("_", "-"))
        value = value if has_value else following
        # Not a number: a missing value, which tyro reports, or the word None, which tyro accepts
        # for an option without a default.
        if field_type not in (int, float) or value in ("", "None") or value.startswith("--"):
            continue
        try:
            field_type(value)
        except ValueError:
            number = "a whole number" if field_type is int else "a number"
            raise WrongUse(f"{name} {value}: must be {number}.") from None


def _fields(options: type) -> Iterator[tuple[str, Any]]:
    """Yields the name of each option and its type; for `T | None` the type T."""
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        field_type = hints[field.name]
        # Options of a nested dataclass have no prefix (`OmitArgPrefixes` in `cli.parse`).
        if dataclasses.is_dataclass(field_type):
            yield from _fields(typing.cast(type, field_type))
            continue
        if isinstance(field_type, types.UnionType):
            members = [x for x in typing.get_args(field_type) if x is not type(None)]
            field_type = members[0] if len(members) == 1 else field_type
        if field.name not in ("script", "arguments"):
            yield f"--{field.name.replace('_', '-')}", field_type
