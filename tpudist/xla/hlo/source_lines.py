"""Parses the tables of source lines of a compiled program.

HLO writes source lines in two forms, inline or in tables at the top of the text.
"""

import re


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
