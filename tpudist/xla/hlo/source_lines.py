"""Finds the user's source line of an instruction, a call or an error.

HLO writes source lines in two forms, inline or in tables at the top of the text (`Sources`).
"""

import functools
import pathlib
import re
import traceback

from tpudist.xla import program_packages

_LIBRARY = pathlib.Path(__file__).parents[2]
_MODELS = _LIBRARY / "models"
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = pathlib.Path(traceback.__file__).parent


@functools.lru_cache(maxsize=4096)
def users_line(stack: tuple[str, ...]) -> str | None:
    """Returns the innermost line "file:line" of the user; None for an empty stack.

    Lines of this library and of installed packages count only if the stack has no others.
    """
    files = [line.rpartition(":")[0] for line in stack]
    not_ours = [i for i, file in enumerate(files) if not _is_library(file)]
    users = (i for i in not_ours if not _is_installed(files[i]))
    innermost = next(users, not_ours[0] if not_ours else 0)
    return stack[innermost] if stack else None


def line_of_call() -> str:
    """Returns the user's line "file:line" that this thread runs; empty if there is none."""
    stack = (f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_stack(None))
    return users_line(tuple(line for line in stack if "<frozen" not in line)) or ""


def line_of_error(error: BaseException) -> str:
    """Returns the user's line "file:line" that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    stack = tuple(f"{x.filename}:{x.lineno}" for x in reversed(frames) if "<" not in x.filename)
    return users_line(stack) or "an unknown line"


def is_other_library(file: str) -> bool:
    """Whether a file belongs to an installed package other than tpudist, or to Python."""
    return _is_installed(file) and not _is_library(file)


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    path = pathlib.Path(file)
    if _INSTALLED.isdisjoint(path.parts):
        return path.is_relative_to(_STANDARD)
    return not program_packages.has_file(file)


@functools.lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    path = pathlib.Path(file)
    # The reference models are written as a user would write them, so their lines count as the
    # user's. These two files lay out arrays and apply layers for the models, and do not count.
    is_models = path.is_relative_to(_MODELS) and path.name not in ("logical.py", "pipeline.py")
    return file.startswith("<frozen") or (path.is_relative_to(_LIBRARY) and not is_models)


class Sources:
    """Tables of source lines at the top of the text, to which instructions refer by number.

    Args:
        text: Text of a compiled program.
    """

    def __init__(self, text: str):
        tables: dict[str, dict[int, str]] = {}
        table: dict[int, str] = {}
        for line in _header(text).splitlines():
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = tables.setdefault(line, {})
            elif entry := re.match(r"(\d+) (.*)", line):
                table[int(entry[1])] = entry[2]
        self._files = tables.get("FileNames", {})
        self._locations = tables.get("FileLocations", {})
        self._frames = tables.get("StackFrames", {})
        self._stacks: dict[int, tuple[str, ...]] = {}

    def lines_of(self, instruction: str) -> tuple[str, ...]:
        """Returns the source lines of an instruction, innermost first.

        Args:
            instruction: Line of text of the instruction.
        """
        if inline := re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction):
            return (f"{inline[1]}:{inline[2]}",)
        frame = _number(instruction, "stack_frame_id")
        if frame not in self._stacks:
            self._stacks[frame] = self._walk(frame)
        return self._stacks[frame]

    def _walk(self, frame: int) -> tuple[str, ...]:
        lines = []
        while frame in self._frames:
            location = self._locations[_number(self._frames[frame], "file_location_id")]
            file = self._files[_number(location, "file_name_id")].strip('"')
            line = f"{file}:{_number(location, 'line')}"
            if line not in lines[-1:]:
                lines.append(line)
            # XLA prints the parent's number plus one: a frame without a parent prints 1. Frame 0
            # does not exist, so that ends the walk.
            frame = _number(self._frames[frame], "parent_frame_id") - 1
        return tuple(lines)


def _header(text: str) -> str:
    """Returns the text before the first computation, which contains the tables."""
    first = re.search(r"^(?:ENTRY )?%?[\w.-]+ \(.*\{$", text, re.MULTILINE)
    return text[: first.start()] if first else text


def _number(text: str, name: str) -> int:
    """Returns the value of `name=value` in `text`; 0 without it."""
    match = re.search(rf"\b{name}=(\d+)", text)
    return int(match[1]) if match else 0
