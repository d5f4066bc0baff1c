"""Notebooks: the code cells are one program; a cell that writes a file is another program.

IPython commands, such as `!pip install` and `%%bash`, stay unchanged.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from tpudist.port.leftovers import Leftover
from tpudist.port.port_program import CannotPort, Ported, port_program

# Statements that replace cell borders and IPython commands during the port, which does not change
# them.
_CELL = re.compile(r"^__tpudist_cell__\((\d+)\)\n", re.MULTILINE)
_LINE = re.compile(r"__tpudist_line__\((\d+)\)")
_IPYTHON = re.compile(r"^([ \t]*)((?:!|\?|%%?[A-Za-z]).*)$", re.MULTILINE)
_FILE = re.compile(r"\s*%%writefile\b.*\n")


def port_notebook(
    source: str,
    *,
    is_whole: bool = True,
    on_pass: Callable[[int, int], None] = lambda number, total: None,
) -> Ported:
    """Ports the code cells of a notebook; leftovers have a cell and a line in it.

    The arguments are the same as for `port_program`.

    Raises:
        CannotPort: If the source is not a notebook, or its program cannot be ported.
    """
    try:
        notebook: dict[str, Any] = json.loads(source)
        cells = notebook["cells"]
        texts = {
            i: "".join(cell["source"])
            for i, cell in enumerate(cells)
            if cell["cell_type"] == "code"
        }
    except (ValueError, KeyError, TypeError) as error:
        raise CannotPort(
            "It is not a valid notebook: its cells cannot be read. Save it as .ipynb again."
        ) from error
    # A cell with a cell magic (`%%bash`, `%%writefile`) is not Python of the program.
    of_program = {i: text for i, text in texts.items() if not text.lstrip().startswith("%%")}
    new, leftovers, stays = _port_cells(of_program, is_whole, on_pass)
    for i, text in texts.items():
        if file := _FILE.match(text):
            ported = port_program(text[file.end() :], is_whole=False)
            new[i] = file[0] + ported.source
            first = file[0].count("\n")
            leftovers += [
                dataclasses.replace(leftover, line=leftover.line + first, cell=i + 1)
                for leftover in ported.leftovers
            ]
            stays |= set(ported.stays)
    for i, text in new.items():
        if text != texts[i]:
            cells[i]["source"] = text.splitlines(keepends=True)
    leftovers.sort(key=lambda leftover: (leftover.cell or 0, leftover.line, leftover.name))
    is_same = all(new.get(i, text) == text for i, text in texts.items())
    # Notebook editors indent by 1 blank, some tools by 2 or 4. The old indentation keeps the diff
    # small.
    indent = re.search(r'^\{\n( *)"', source)
    if not is_same:
        num_blanks = len(indent[1]) if indent else 1
        source = json.dumps(notebook, indent=num_blanks, ensure_ascii=False) + "\n"
    return Ported(source, tuple(leftovers), tuple(sorted(stays)))


def show_code(source: str) -> str:
    """Returns the code of a notebook, each cell under its number, to compare two notebooks."""
    return "".join(
        f"# In cell {i}:\n{''.join(cell['source'])}\n"
        for i, cell in enumerate(json.loads(source)["cells"], 1)
        if cell["cell_type"] == "code"
    )


def _port_cells(
    texts: dict[int, str], is_whole: bool, on_pass: Callable[[int, int], None]
) -> tuple[dict[int, str], list[Leftover], set[str]]:
    """Returns the cells of one program after the port, its leftovers, and the names that stay."""
    lines: list[str] = []

    def hide(line: re.Match[str]) -> str:
        lines.append(line[2])
        return f"{line[1]}__tpudist_line__({len(lines) - 1})"

    program = "".join(
        f"__tpudist_cell__({i})\n{text if _is_python(text) else _IPYTHON.sub(hide, text)}\n"
        for i, text in texts.items()
    )
    # The cells are one program, because names of one cell are read in others. Calls with an unknown
    # name mark the borders: no transformer changes them, and they survive as statements.
    ported = port_program(program, is_whole=is_whole, on_pass=on_pass)
    _, *parts = _CELL.split(ported.source)
    numbers = [int(number) for number in parts[::2]]
    assert numbers == list(texts)  # no transformer removes such a statement
    new = {
        i: _LINE.sub(lambda line: lines[int(line[1])], text.removesuffix("\n"))
        for i, text in zip(numbers, parts[1::2], strict=True)
    }
    # Marks above statements move lines, so the borders are found again in the new source.
    begins = [
        (ported.source[: found.start()].count("\n") + 1, int(found[1]))
        for found in _CELL.finditer(ported.source)
    ]
    leftovers = []
    for leftover in ported.leftovers:
        begin, i = max(place for place in begins if place[0] <= leftover.line)
        leftovers.append(dataclasses.replace(leftover, line=leftover.line - begin, cell=i + 1))
    return new, leftovers, set(ported.stays)


def _is_python(text: str) -> bool:
    """Returns whether a cell is plain Python: a line of an expression may begin with `%`, too."""
    try:
        compile(text, "cell", "exec")
    except (SyntaxError, ValueError):
        return False
    return True
