"""Loads the user's function that creates a step: "module:function" or "file.py:function"."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from tpudist.cli.errors import WrongUse
from tpudist.planner.layouts.candidates import Candidate
from tpudist.planner.show.formats import format_error

RULE = (
    "Name a function make_step(candidate) that returns (strategy, fn, args), or for plain JAX a "
    "function make_step() that returns (fn, args); as my_module:make_step or "
    "my_folder/my_file.py:make_step."
)
# What a step itself needs, if it was named in place of the function that makes it.
_RULE_OF_STEPS = (
    "The shapes of its arguments are not known. Write a function that returns them with the step, "
    "and name it: def make_step(): return {name}, (params, batch), whose arrays may be "
    "jax.ShapeDtypeStructs. A dict as a third element has arguments of tpudist.planner.plan: "
    '{{"mesh": {{"data": 8}}, "in_shardings": (P(), P("data"))}}.'
)


def load(name: str) -> Callable[[Candidate], tuple[Any, ...]]:
    """Returns the function of a name; modules in the current folder come first.

    The returned function gives the strategy, the step and its arguments, and perhaps a dict of
    arguments of `Strategy.plan`. For a step of plain JAX the strategy is None, and the dict has
    arguments of `planner.plan`.

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

    num_required = _count_parameters(make_step)
    if isinstance(make_step, jax.stages.Wrapped) or num_required > 1:
        kind = "jitted function" if isinstance(make_step, jax.stages.Wrapped) else "step"
        raise WrongUse(f"{name} is a {kind}. {_RULE_OF_STEPS.format(name=attribute)}")

    def make_checked_step(candidate: Candidate) -> tuple[Any, ...]:
        try:
            step = make_step(candidate) if num_required else make_step()
        except SystemExit as error:
            raise WrongUse(f"{name} failed: {format_error(error)}") from error
        return _check(step, name)

    return make_checked_step


def _count_parameters(function: Callable[..., Any]) -> int:
    """Returns the number of positional arguments that a function must receive."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function in C
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(x.kind in positional and x.default is x.empty for x in parameters)


def _check(step: Any, name: str) -> tuple[Any, ...]:
    """Returns what a user's function has returned, with None as the strategy of plain JAX."""
    if isinstance(step, jax.stages.Lowered):
        return None, step, ()
    parts: tuple[Any, ...] = tuple(step) if isinstance(step, tuple | list) else ()
    if parts and callable(parts[0]):  # no strategy is
        parts = None, *parts
    if len(parts) not in (3, 4):
        size = f" of {len(step)}" if isinstance(step, tuple | list) else ""
        raise WrongUse(f"{name} returned a {type(step).__name__}{size}. {RULE}")
    if parts[0] is None and not isinstance(parts[2], tuple | list):
        raise WrongUse(
            f"{name} returned a {type(parts[2]).__name__} as the arguments of the step. They must "
            "be a tuple, also if there is only one: return fn, (params,). Keyword arguments go "
            'into a dict as the third element: return fn, (), {"kwargs": {"params": params}}.'
        )
    if len(parts) == 4 and not isinstance(parts[3], Mapping):
        raise WrongUse(
            f"{name} returned a {type(parts[3]).__name__} as its last element. It must be a dict "
            f"of arguments of {'planner.plan' if parts[0] is None else 'Strategy.plan'}, such as "
            f'{{"tokens_per_step": 4096}}.'
        )
    for option in ("topology", "cache"):
        if len(parts) == 4 and option in parts[3]:
            raise WrongUse(
                f"{name} returned the argument {option!r} of a plan. Omit it there: the option "
                f"--{option} of the command line decides."
            )
    return parts


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
