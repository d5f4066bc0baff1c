"""Finds the user's source line in a stack, of a call or of an error; and the code of a callable.

The user's code is everything but this library, installed packages and Python.
"""

import functools
import os
import pathlib
import traceback
from typing import Any

from tpudist.xla import program_packages

_LIBRARY = pathlib.Path(__file__).parents[1]
_MODELS = _LIBRARY / "models"
_COMMAND = "tpudist"  # the script in the folder of the interpreter, which has no suffix
# Files of the models that lay out arrays and apply layers, as this library does for a user's model.
_LAYERS_OF_MODELS = ("logical.py", "pipeline.py")


@functools.lru_cache(maxsize=4096)
def users_line(stack: tuple[str, ...]) -> str | None:
    """Returns the innermost line "file:line" of the user; None without lines of other code.

    Lines of installed packages count only if the stack has no others.
    """
    files = [line.rpartition(":")[0] for line in stack]
    not_ours = [i for i, file in enumerate(files) if not _is_library(file)]
    users = (i for i in not_ours if not program_packages.is_library_file(files[i]))
    innermost = next(users, not_ours[0] if not_ours else None)
    return None if innermost is None else stack[innermost]


def line_of_call() -> str:
    """Returns the user's line "file:line" that this thread runs; empty if there is none."""
    stack = (f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_stack(None))
    return users_line(tuple(line for line in stack if "<frozen" not in line)) or ""


def line_of_error(error: BaseException) -> str:
    """Returns the user's line "file:line" that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    stack = tuple(f"{x.filename}:{x.lineno}" for x in reversed(frames) if "<" not in x.filename)
    return users_line(stack) or "an unknown line"


def code_of(function: object, otherwise: Any = None) -> Any:
    """Returns the code object of a user's function or method.

    Returns `otherwise` for other callables, such as partials, jitted functions and classes.
    """
    return getattr(function, "__code__", otherwise)


def unwrap(function: Any) -> Any:
    """Returns the function in a user's decorated or jitted function; else the callable itself."""
    return getattr(function, "__wrapped__", function)


def line_of_definition(function: object) -> str:
    """Returns "file.py:line" of a user's callable, without its folder; empty if it has no code."""
    code = code_of(function)
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}" if code else ""


def is_other_library(file: str) -> bool:
    """Whether a file belongs to an installed package other than tpudist, or to Python."""
    return program_packages.is_library_file(file) and not _is_library(file)


@functools.lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    path = pathlib.Path(file)
    # The reference models are written as a user would write them, so their lines count as the
    # user's.
    is_model = path.is_relative_to(_MODELS) and path.name not in _LAYERS_OF_MODELS
    is_ours = path.name == _COMMAND or (path.is_relative_to(_LIBRARY) and not is_model)
    return file.startswith("<frozen") or is_ours
