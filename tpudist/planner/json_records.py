"""Dataclasses as JSON and back.

`loads` checks each value against the type of its field, so a damaged or foreign file raises an
error, and cannot create objects of other classes.
"""

import dataclasses
import json
import numbers
import types
import typing
from typing import Any, TypeVar

import numpy as np

_T = TypeVar("_T")


def dumps(value: object, version: int) -> str:
    """Returns a dataclass, with dataclasses in it, as JSON, without fields named `_...`.

    Raises:
        ValueError: If it has a number that JSON does not have, such as nan.
    """
    plain = {"kind": type(value).__name__, "version": version} | _to_plain(value)
    try:
        return json.dumps(plain, indent=1, allow_nan=False)
    except ValueError as error:
        raise ValueError(
            f"This {type(value).__name__} has a number that JSON cannot represent ({error}). "
            "Remove it."
        ) from None


def loads(cls: type[_T], text: str, version: int) -> _T:
    """Returns the dataclass `cls` that `dumps` wrote.

    Raises:
        ValueError: If the text is not such a dataclass, or has another version of the format.
    """
    try:
        plain = json.loads(text, parse_constant=_refuse_number)
    except ValueError as error:
        raise ValueError(
            f"This text is not a {cls.__name__}: it is not JSON ({error}). Write one with "
            "to_json()."
        ) from None
    if not isinstance(plain, dict) or plain.pop("kind", None) != cls.__name__:
        raise ValueError(f"This JSON is not a {cls.__name__}. Write one with to_json().")
    if (other := plain.pop("version", None)) != version:
        raise ValueError(
            f"This {cls.__name__} was written in version {other} of the format, but this tpudist "
            f"reads version {version}. Make it again, or use the tpudist that wrote it."
        )
    try:
        return _from_plain(cls, plain)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"This JSON is not a complete {cls.__name__}: {error!r}. Write it again with to_json()."
        ) from error


def _refuse_number(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _to_plain(value: object) -> Any:
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value) if not f.name.startswith("_")]
        return {name: _to_plain(vars(value)[name]) for name in fields}
    # JSON has only texts as keys: other keys become texts, and stay texts when they are read.
    if isinstance(value, dict | types.MappingProxyType):
        return {str(key): _to_plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(x) for x in value]
    return value.item() if isinstance(value, np.generic) else value


def _from_plain(field_type: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(field_type), typing.get_args(field_type)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        # Only `X | None` names the class to build. Values of other unions, such as `int | str`, are
        # returned as JSON has them.
        others = [x for x in arguments if x is not type(None)]
        return _from_plain(others[0], value) if len(others) == 1 else value
    if dataclasses.is_dataclass(field_type):
        _check_type(dict, value)
        # The types of the fields direct the reading: a class that the text names is never looked
        # up.
        hints = {
            k: t for k, t in typing.get_type_hints(field_type).items() if not k.startswith("_")
        }
        if unknown := set(value) - set(hints):
            raise ValueError(f"{field_type.__name__} has no {', '.join(sorted(unknown))}")  # type: ignore
        return field_type(**{name: _from_plain(hints[name], x) for name, x in value.items()})  # type: ignore
    if origin is tuple:
        _check_type(list, value)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_from_plain(arguments[0], x) for x in value)
        return tuple(_from_plain(t, x) for t, x in zip(arguments, value, strict=True))
    if origin is dict:
        _check_type(dict, value)
        return {key: _from_plain(arguments[1], x) for key, x in value.items()}
    if field_type is tuple:
        _check_type(list, value)
        return tuple(value)
    if field_type in (bool, str):
        _check_type(field_type, value)
    # An integer is valid for a float field, and becomes a float.
    if field_type in (int, float):
        _check_type(numbers.Real, value)
        return field_type(value) if field_type is float else value
    return value


def _check_type(field_type: type, value: object) -> None:
    if not isinstance(value, field_type) or (
        field_type is numbers.Real and isinstance(value, bool)
    ):
        raise TypeError(f"{value!r:.40} is not a {field_type.__name__}")
