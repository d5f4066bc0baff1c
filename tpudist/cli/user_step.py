"""Loads the user's function that creates a step: "module:function" or "file.py:function"."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tpudist.cli.errors import WrongUse
from tpudist.planner.layouts.candidates import Candidate
from tpudist.planner.show.formats import format_error

RULE = (
    "Name a function make_step(candidate) that returns (strategy, fn, args), as "
    "my_module:make_step or my_folder/my_file.py:make_step."
)


def load(name: str) -> Callable[[Candidate], tuple[Any, ...]]:
    """Returns the function of a name; modules in the current folder come first.

    Raises:
        WrongUse: If there is no such function, or its module cannot be imported. The returned
            function also raises it, for results that a plan cannot use.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise WrongUse(f"{name!r} does not name a function. {RULE}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        # As `python -m` does; a console script has the folder of its interpreter there instead.
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except WrongUse:
        raise
    except (Exception, SystemExit) as error:  # a script may call sys.exit
        raise WrongUse(f"{place} cannot be imported: {format_error(error)}") from error
    # An attribute of the user's module, which may not exist.
    make_step = getattr(module, attribute, None)
    if not callable(make_step):
        raise WrongUse(f"{place} has no function {attribute!r}. {RULE}")

    def make_checked_step(candidate: Candidate) -> tuple[Any, ...]:
        try:
            step = make_step(candidate)
        except SystemExit as error:
            raise WrongUse(f"{name} failed: {format_error(error)}") from error
        if not isinstance(step, tuple | list) or len(step) not in (3, 4):
            size = f" of {len(step)}" if isinstance(step, tuple | list) else ""
            raise WrongUse(f"{name} returned a {type(step).__name__}{size}. {RULE}")
        if len(step) == 4 and not isinstance(step[3], Mapping):
            raise WrongUse(
                f"{name} returned a {type(step[3]).__name__} as its fourth element. It must be "
                f'a dict of arguments of Strategy.plan, such as {{"tokens_per_step": 4096}}.'
            )
        return tuple(step)

    return make_checked_step


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Otherwise the module exists, and one of its imports is missing.
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise WrongUse(
                f"There is no module {name!r} in this folder or among the installed ones. {RULE}"
            ) from error
        raise


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise WrongUse(f"There is no file {path}. {RULE}")
    # A unique name, because the file may have the name of an installed module, such as optax.py.
    name = f"_tpudist_own_step_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses and pickle look a class up in the module of that name.
    sys.modules[name] = module
    # The file may import its neighbors, as with `python file.py`.
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module
