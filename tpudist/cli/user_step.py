"""Loads the user's function that creates a step: "module:function" or "file.py:function"."""

from __future__ import annotations

import dataclasses
import dis
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from tpudist.cli.errors import WrongUse
from tpudist.cli.memory_limit import limit_to_free_memory, means_no_memory
from tpudist.planner import Plan
from tpudist.planner.layouts.candidates import Candidate
from tpudist.planner.show.formats import format_error
from tpudist.xla import descriptions, emulation, topology as topologies
from tpudist.xla.compiler.visible_devices import means_absent_devices, show_devices
from tpudist.xla.hardware import slices
from tpudist.xla.settings import Setting

RULE = (
    "Name a function make_step(candidate) that returns (strategy, fn, args), or for plain JAX a "
    "function make_step() that returns (fn, args); as my_module:make_step or "
    "my_folder/my_file.py:make_step."
)
RULE_OF_CANDIDATES = (
    "Write a function make_step(candidate) that follows candidate.mesh_axes, candidate.remat and "
    "candidate.microbatches."
)
# What a step itself needs, if it was named in place of the function that makes it.
_RULE_OF_STEPS = (
    "The shapes of its arguments are not known. Write a function that returns them with the step, "
    "and name it: def make_step(): return {name}, ({arguments}), whose arrays may be "
    "jax.ShapeDtypeStructs. A dict as a third element has arguments of tpudist.planner.plan: "
    '{{"mesh": {{"data": 8}}, "in_shardings": (P(), P("data"))}}.'
)
_RULE_OF_CREATORS = (
    " If {name} itself creates and returns a step, call it in that function with its arguments: "
    "def make_step(): return {name}(...). Or put print(tpudist.planner.plan(train_step, state, "
    "batch, topology=...)) where your program calls its step, and run the program."
)
_PROGRAM = (
    "a function that returns nothing, so it was not called. Where it calls its step, return the "
    "step and its arguments instead, such as return train_step, (state, batch)."
)
_RULE_OF_SHAPES = (
    " Create shapes instead: jax.eval_shape(init) for init(), and jax.ShapeDtypeStruct(x.shape, "
    "x.dtype, sharding=...) for jax.device_put(x, ...)."
)
_RULE_OF_MEMORY = f" The arrays exceed the free memory of this machine.{_RULE_OF_SHAPES}"
_MODEL_ARGUMENTS = "x, y"
# Parts of errors of JAX and NumPy about a mesh with more devices than this machine has.
_TOO_FEW_DEVICES = (
    "Number of devices",
    "cannot reshape array of size",
    "XLA devices are available",
)
_MAX_NAMES = 8  # of functions in a message
# Each emulated device stores its own copy of a replicated array.
_MAX_EMULATED = 64


@dataclasses.dataclass(frozen=True)
class UserStep:
    """A function of the user that makes a step.

    Attributes:
        make: Returns a step, for a candidate.
        takes_candidate: Whether the function of the user receives the candidate.
    """

    make: Callable[[Candidate], tuple[Any, ...]]
    takes_candidate: bool


def load(name: str, topology: str) -> UserStep:
    """Returns the function of a name; modules in the current folder come first.

    It gives the strategy, the step and its arguments, and perhaps a dict of
    arguments of `Strategy.plan`. For a step of plain JAX there is no strategy (None), and the dict
    has arguments of `planner.plan`.

    Args:
        name: "module:function" or "file.py:function". It may also name a lowered program.
        topology: Slice of the plan. The module and the function see as many emulated devices; on
            larger slices, the slice itself if they make a mesh of more devices than this machine.

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
    _emulate_slice(topology)
    is_file = place.endswith(".py")
    try:
        with limit_to_free_memory():
            module = _see_slice(
                topology, lambda: _import_file(Path(place)) if is_file else _import_module(place)
            )
    except WrongUse:
        raise
    except (Exception, SystemExit) as error:  # a script may call sys.exit
        advice = _RULE_OF_MEMORY if means_no_memory(error) else ""
        raise WrongUse(f"{place} cannot be imported: {format_error(error)}{advice}") from error
    # An attribute of the user's module, which may not exist.
    make_step = getattr(module, attribute, None)
    if isinstance(make_step, jax.stages.Lowered | jax.stages.Traced):
        return UserStep(lambda candidate: (None, make_step, ()), takes_candidate=False)
    if not callable(make_step):
        raise WrongUse(f"{place} has no function {attribute!r}.{_list_functions(module)} {RULE}")

    num_required = _count_parameters(make_step)
    if num_required is None or num_required > 1:
        raise WrongUse(f"{name} is {_describe_step(make_step, attribute)}")
    if not (_takes_candidate(make_step) or _returns_value(make_step)):
        raise WrongUse(f"{name} is {_PROGRAM}")
    if num_required and _takes_argv(make_step):
        make_step, num_required = functools.partial(make_step, [place]), 0
    if "absl.flags" in sys.modules:  # of a program whose flags have their defaults
        sys.modules["absl.flags"].FLAGS.mark_as_parsed()

    def make_checked_step(candidate: Candidate) -> tuple[Any, ...]:
        try:
            with limit_to_free_memory():
                if num_required:
                    step = make_step(candidate)
                else:
                    step = _see_slice(topology, make_step)
        except SystemExit as error:
            raise WrongUse(f"{name} failed: {format_error(error)}") from error
        except Exception as error:
            if means_absent_devices(error):
                raise WrongUse(
                    f"{name} computed a value on devices of {topology}, which are descriptions: "
                    f"they compile programs and run none. {format_error(error)}{_RULE_OF_SHAPES}"
                ) from error
            if means_no_memory(error):
                text = f"{name} failed: {format_error(error)}{_RULE_OF_MEMORY}"
                raise WrongUse(text) from error
            if num_required and Candidate.__name__ in str(error):
                raise WrongUse(
                    f"{name} failed when it was called with a candidate, as make_step(candidate): "
                    f"{format_error(error)}. If it is not such a function, it is "
                    f"{_describe_step(make_step, attribute)}"
                ) from error
            raise
        return _check(step, name)

    return UserStep(make_checked_step, takes_candidate=bool(num_required))


def _emulate_slice(topology: str) -> None:
    """Emulates the devices of a slice, unless the environment or a program chose other devices.

    So a program that creates arrays on a mesh of `jax.device_count()` devices needs no change.
    """
    number = slices.parse(topology).num_devices
    is_chosen = (
        emulation.has_backend()
        or Setting.PLATFORMS.read() != "cpu"
        or Setting.NUM_CPU_DEVICES.read() > 0
        or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    )
    if number <= _MAX_EMULATED and not is_chosen:
        emulation.emulate(number)


def _see_slice(topology: str, act: Callable[[], Any]) -> Any:
    """Calls a function of the user, once more for the devices of a slice if it needs them."""
    try:
        return act()
    except ValueError as error:
        if not any(text in str(error) for text in _TOO_FEW_DEVICES):
            raise
    # Not at once: a function that makes a strategy needs devices that can compute.
    with show_devices(topologies.devices(topology)):
        return act()


def _count_parameters(function: Callable[..., Any]) -> int | None:
    """Returns the number of arguments that a function must receive; None for a step itself.

    A step is what `jax.jit`, Equinox or another library returns, or an object such as a model.
    """
    if isinstance(function, jax.stages.Wrapped) or hasattr(function, "lower"):
        return None
    if not (_is_function(function) or inspect.isclass(function)):
        return None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function in C
        return 1
    required = [x for x in parameters if x.default is x.empty]
    if any(x.kind is x.KEYWORD_ONLY for x in required):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(x.kind in kinds for x in required)


def _takes_candidate(function: Callable[..., Any]) -> bool:
    """Returns whether a function says that its parameter is a candidate."""
    return "candidate" in str(inspect.signature(function)).lower()


def _takes_argv(function: Callable[..., Any]) -> bool:
    """Returns whether a function is a program's `main(argv)`, whose `argv` may be unused."""
    name, *_ = inspect.signature(function).parameters
    return "argv" in name or name.startswith(("_", "unused"))


def _returns_value(function: Callable[..., Any]) -> bool:
    """Returns whether a function returns another value than None, if its code can be read."""
    if not inspect.isfunction(function):
        return True
    none = None
    for x in dis.get_instructions(function):
        if x.opname == "RETURN_CONST" and x.argval is not None:
            return True
        if x.opname == "RETURN_VALUE" and not none:
            return True
        none = x.opname == "LOAD_CONST" and x.argval is None
    return False


def _is_function(value: object) -> bool:
    # Not `inspect.isroutine`, which accepts any object with a `__get__`.
    kinds = (inspect.isfunction, inspect.ismethod, inspect.isbuiltin)
    return any(is_kind(value) for is_kind in kinds) or isinstance(value, functools.partial)


def _describe_step(step: Any, name: str) -> str:
    """Returns what a step is, and the function that the user should write."""
    fit = getattr(step, "fit", None)  # of a Keras model, or another object of the user
    if callable(fit) and not _is_function(step):
        rule = _RULE_OF_STEPS.format(name=f"{name}.fit", arguments=_MODEL_ARGUMENTS)
        return f"a model. {rule}"
    try:
        names = [*inspect.signature(step).parameters]
        arguments = ", ".join(names) if len(names) > 1 else f"{names[0]}," if names else ""
    except (TypeError, ValueError):  # of a function in C
        arguments = "params, batch"
    kind = "jitted function" if isinstance(step, jax.stages.Wrapped) else "step"
    creators = _RULE_OF_CREATORS.format(name=name) if inspect.isfunction(step) else ""
    return f"a {kind}. {_RULE_OF_STEPS.format(name=name, arguments=arguments)}{creators}"


def _list_functions(module: ModuleType) -> str:
    """Returns the functions that a module defines, for an error."""
    own = [
        name
        for name, x in vars(module).items()
        if inspect.isfunction(x) and x.__module__ == module.__name__ and not name.startswith("_")
    ]
    if not own:
        return ""
    more = ", ..." if len(own) > _MAX_NAMES else ""
    return f" It has {', '.join(own[:_MAX_NAMES])}{more}."


def _check(step: Any, name: str) -> tuple[Any, ...]:
    """Returns what a user's function has returned, with None as the strategy of plain JAX."""
    if isinstance(step, jax.stages.Lowered | jax.stages.Traced):
        return None, step, ()
    if isinstance(step, Plan):
        raise WrongUse(
            f"{name} returned a plan. Return the arguments of tpudist.planner.plan instead: return "
            "fn, args, and a dict of the others. --topology is the slice."
        )
    if callable(step):
        own_name = descriptions.name_of(step) if _is_function(step) else "model"
        raise WrongUse(f"{name} returned {_describe_step(step, own_name)}")
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
