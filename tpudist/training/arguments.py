"""Parses and checks values of command-line options; errors are `ValueError`s."""

from __future__ import annotations

from collections.abc import Mapping


def parse_axes(text: str, option: str = "--replica-axes") -> dict[str, int]:
    """Returns `{"fsdp": 4, "tensor": 2}` for `"fsdp=4,tensor=2"`; no axes for the empty text.

    Args:
        text: Value of the option.
        option: Option, for messages.
    """
    axes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not (name.isidentifier() and equals and size.isdigit() and int(size) > 0):
            raise ValueError(
                f"{option} {text!r}: {part!r} is not an axis and its size. Write name=size, "
                f"separated by commas, such as fsdp=4,tensor=2."
            )
        if name in axes:
            raise ValueError(f"{option} {text!r} has the axis {name!r} twice. Write it once.")
        axes[name] = int(size)
    return axes


def check_positive(values: Mapping[str, float | None]) -> None:
    """Checks options, by name, that must be above 0 or None."""
    for name, value in values.items():
        # `not value > 0` also rejects NaN, which compares as False with everything.
        if value is not None and not value > 0:
            raise ValueError(f"--{name} is {value}. It must be above 0.")


def check_not_negative(values: Mapping[str, float | None]) -> None:
    """Checks options, by name, that must be 0 or above, or None."""
    for name, value in values.items():
        if value is not None and not value >= 0:
            raise ValueError(f"--{name} is {value}. It must be 0 or above.")
