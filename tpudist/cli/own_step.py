"""Finds the function that makes a user's own step: "module:function" or "file.py:function"."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpudist.cli.errors import WrongUse

RULE = (
    "Name a function make_step(candidate) that gives (strategy, fn, args), as my_module:make_step "
    "or my_folder/my_file.py:make_step."
)


def load(name: str) -> Callable[[Any], tuple[Any, ...]]:
    """The function called `name`; modules are looked for in the current folder first.

    Raises:
        WrongUse: There is none, or it cannot be imported; and from the function, if it does not
            give what a plan needs.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise WrongUse(f"{name!r} names no function. {RULE}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _module(place)
    except WrongUse:
        raise
    except Exception as error:
        raise WrongUse(f"{place} cannot be imported: {told(error)}") from error
    make_step = getattr(module, attribute, None)
    if not callable(make_step):
        raise WrongUse(f"{place} has no function {attribute!r}. {RULE}")

    def made(candidate: Any) -> tuple[Any, ...]:
        step = make_step(candidate)
        if not isinstance(step, tuple | list) or len(step) not in (3, 4):
            size = f" of {len(step)}" if isinstance(step, tuple | list) else ""
            raise WrongUse(f"{name} gave a {type(step).__name__}{size}. {RULE}")
        return tuple(step)

    return made


def told(error: BaseException) -> str:
    """An error of the user's code: its kind, its message and the line that it came from."""
    message = f"{type(error).__name__}: {error}"
    here = Path(__file__).resolve().parent.parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if (
            path.exists()
            and here not in path.resolve().parents
            and "site-packages" not in str(path)
        ):
            return f"{message} ({path}:{frame.lineno})"
    return message


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise WrongUse(
                f"There is no module {name!r} in this folder or among the installed ones. {RULE}"
            ) from error
        raise


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise WrongUse(f"There is no file {path}. {RULE}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module
