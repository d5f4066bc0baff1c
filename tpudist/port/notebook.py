"""Notebooks: the code cells are one program; a cell that writes a file is another program.

IPython commands, such as `!pip install` and `%%bash`, stay unchanged.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from tpudist.port.analysis.nodes import CELL_MARK, LINE_MARK
from tpudist.port.leftovers import Leftover
from tpudist.port.port_program import CannotPort, Ported, port_program

_CELL_MARK = re.compile(rf"^{CELL_MARK}\((\d+)\)\n", re.MULTILINE)
_LINE_MARK = re.compile(rf"{LINE_MARK}\((\d+)\)")
_IPYTHON = re.compile(r"^([ \t]*)((?:!|\?|%%?[A-Za-z]).*)$", re.MULTILINE)
_WRITEFILE = re.compile(r"\s*%%writefile\b.*\n")


def port_notebook(
    source: str,
    *,
    creates_strategy: bool = True,
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
    program_texts = {i: text for i, text in texts.items() if not text.lstrip().startswith("%%")}
    new_texts, leftovers, stays = _port_cells(program_texts, creates_strategy, on_pass)
    for i, text in texts.items():
        if command := _WRITEFILE.match(text):
            ported = port_program(text[command.end() :], creates_strategy=False)
            new_texts[i] = command[0] + ported.source
            first = command[0].count("\n")
            leftovers += [
                dataclasses.replace(leftover, line=leftover.line + first, cell=i + 1)
                for leftover in ported.leftovers
            ]
            stays |= set(ported.stays)
    for i, text in new_texts.items():
        if text != texts[i]:
            cells[i]["source"] = text.splitlines(keepends=True)
    leftovers.sort(key=lambda leftover: (leftover.cell or 0, leftover.line, leftover.name))
    is_same = all(text == texts[i] for i, text in new_texts.items())
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
    texts: dict[int, str], creates_strategy: bool, on_pass: Callable[[int, int], None]
) -> tuple[dict[int, str], list[Leftover], set[str]]:
    """Returns the cells of one program after the port, its leftovers, and the names that stay."""
    commands: list[str] = []

    def hide(line: re.Match[str]) -> str:
        commands.append(line[2])
        return f"{line[1]}{LINE_MARK}({len(commands) - 1})"

    program = "".join(
        f"{CELL_MARK}({i})\n{text if _is_python(text) else _IPYTHON.sub(hide, text)}\n"
        for i, text in texts.items()
    )
    # The cells are one program, because names of one cell are read in others.
    ported = port_program(program, creates_strategy=creates_strategy, on_pass=on_pass)
    before, *parts = _CELL_MARK.split(ported.source)
    numbers = [int(number) for number in parts[::2]]
    assert not before  # imports that the port adds come after the first mark
    assert numbers == list(texts)  # no transformer removes a mark
    new_texts = {
        i: _LINE_MARK.sub(lambda line: commands[int(line[1])], text.removesuffix("\n"))
        for i, text in zip(numbers, parts[1::2], strict=True)
    }
    # Marks above statements move lines, so the borders are found again in the new source.
    borders = [
        (ported.source[: found.start()].count("\n") + 1, int(found[1]))
        for found in _CELL_MARK.finditer(ported.source)
    ]
    leftovers = []
    for leftover in ported.leftovers:
        line, i = max(border for border in borders if border[0] <= leftover.line)
        leftovers.append(dataclasses.replace(leftover, line=leftover.line - line, cell=i + 1))
    return new_texts, leftovers, set(ported.stays)


def _is_python(text: str) -> bool:
    """Returns whether a cell is plain Python: a line of an expression may begin with `%`, too."""
    try:
        compile(text, "cell", "exec")
    except (SyntaxError, ValueError):
        return False
    return True
