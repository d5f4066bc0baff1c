"""Dataclasses as JSON and back, by the types of their fields; nothing else is read."""

import dataclasses
import json
import numbers
import types
import typing
from typing import Any

import numpy as np


def dumps(value: Any, version: int) -> str:
    """A dataclass, and those in it, as JSON; fields that begin with an underscore stay out.

    Raises:
        ValueError: It has a number that JSON has not, such as nan.
    """
    found = {"kind": type(value).__name__, "version": version} | _to_plain(value)
    try:
        return json.dumps(found, indent=1, allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"This {type(value).__name__} has a number that JSON cannot represent ({error}). "
            "Remove it."
        ) from None


def loads(cls: type, text: str, version: int) -> Any:
    """The dataclass `cls` that `dumps` wrote.

    Raises:
        ValueError: The text is something else, or of another version.
    """
    try:
        found = json.loads(text, parse_constant=_refuse_number)
    except ValueError as error:
        raise ValueError(
            f"This text is not a {cls.__name__}: it is not JSON ({error}). Write one with "
            "to_json()."
        ) from None
    if not isinstance(found, dict) or found.pop("kind", None) != cls.__name__:
        raise ValueError(f"This JSON is not a {cls.__name__}. Write one with to_json().")
    if (other := found.pop("version", None)) != version:
        raise ValueError(
            f"This {cls.__name__} was written in version {other} of the format, but this tpudist "
            f"reads version {version}. Make it again, or use the tpudist that wrote it."
        )
    try:
        return _from_plain(cls, found)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"This JSON is not a complete {cls.__name__}: {error!r}. Write it again with to_json()."
        ) from error


def _refuse_number(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value) if not f.name.startswith("_")]
        return {name: _to_plain(getattr(value, name)) for name in fields}
    if isinstance(value, dict | types.MappingProxyType):
        return {str(key): _to_plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(x) for x in value]
    return value.item() if isinstance(value, np.generic) else value


def _from_plain(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        others = [x for x in arguments if x is not type(None)]
        return _from_plain(others[0], value) if len(others) == 1 else value
    if dataclasses.is_dataclass(kind):
        _check_kind(dict, value)
        hints = {k: t for k, t in typing.get_type_hints(kind).items() if not k.startswith("_")}
        if unknown := set(value) - set(hints):
            raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")  # type: ignore
        return kind(**{name: _from_plain(hints[name], x) for name, x in value.items()})  # type: ignore
    if origin is tuple:
        _check_kind(list, value)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_from_plain(arguments[0], x) for x in value)
        return tuple(_from_plain(t, x) for t, x in zip(arguments, value, strict=True))
    if origin is dict:
        _check_kind(dict, value)
        return {key: _from_plain(arguments[1], x) for key, x in value.items()}
    if kind is tuple:
        _check_kind(list, value)
        return tuple(value)
    if kind in (bool, str):
        _check_kind(kind, value)
    if kind in (int, float):
        _check_kind(numbers.Real, value)
        return kind(value) if kind is float else value
    return value


def _check_kind(kind: type, value: Any) -> None:
    if not isinstance(value, kind) or (kind is numbers.Real and isinstance(value, bool)):
        raise TypeError(f"{value!r:.40} is not a {kind.__name__}")
