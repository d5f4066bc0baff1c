"""Docstrings have the form that readers and tools expect: one entry a line, each where it belongs.

`Args`, `Attributes` and `Raises` have entries such as `name: Description.`. Continuation lines are
indented by four more spaces. An entry in the middle of a line was joined to the one before by
mistake, and readers do not find it.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from places import PACKAGE
from syntax import statements

SECTIONS = ("Args:", "Attributes:", "Returns:", "Yields:", "Raises:")
ENTRIES = ("Args:", "Attributes:", "Raises:")
_ENTRY = re.compile(r"\*{0,2}[A-Za-z_][\w.]*(, \*{0,2}[A-Za-z_][\w.]*)*: \S")
_ERROR = re.compile(r"\S.*\s[A-Z]\w*(?:Error|Exception|Warning|Exit|Interrupt): ")


def problems(docstring: str, parameters: set[str] = frozenset()) -> list[str]:
    """Returns the problems of a docstring, by line."""
    found, section = [], None
    for line in docstring.splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if text in SECTIONS:
            section, depth = text, indent
            continue
        if not text:
            continue
        if section and indent <= depth:
            section = None
        if section is None:
            if text.split(" ")[0] in SECTIONS:
                found.append(f"a section header with other text: {text}")
            continue
        if section in ENTRIES:
            if indent == depth + 4 and not _ENTRY.match(text):
                found.append(f"{section} no entry begins with {text}")
            if indent not in (depth + 4, depth + 8) and indent < depth + 8:
                found.append(f"{section} indented by {indent - depth}: {text}")
            others = "|".join(sorted(parameters))
            joined = re.search(rf"[.;] ({others}): [A-Z]", text) if others else None
            if joined or (section == "Raises:" and _ERROR.match(text)):
                found.append(f"{section} two entries in one line: {text}")
    return found


def documented() -> Iterator[tuple[str, str, set[str]]]:
    """Yields the place and text of each docstring, and the parameters that it may document."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in statements(file.read_text()):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                names = {
                    x.arg
                    for x in ast.walk(getattr(node, "args", ast.Pass()))
                    if isinstance(x, ast.arg)
                }
                if text:
                    line = getattr(node, "lineno", 1)
                    yield f"{file.relative_to(PACKAGE)}:{line}", text, names - {"self", "cls"}


def test_every_docstring_has_the_form():
    found = [
        f"{where}: {what}" for where, text, names in documented() for what in problems(text, names)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("docstring", "complaint"),
    [
        ("It.\n\nArgs:\n    a: One. b: Two.", "two entries in one line"),
        ("It.\n\nRaises:\n    ValueError: One. TypeError: Two.", "two entries in one line"),
        ("It.\n\nArgs:\n    a: One\n    that goes on.", "no entry begins with"),
        ("It.\n\nArgs:\n      a: One.", "indented by 6"),
        ("It. Args: a: One.\n\nRaises: ValueError: Two.", "a section header with other text"),
    ],
)
def test_a_mistake_is_found(docstring, complaint):
    assert any(complaint in what for what in problems(docstring, {"a", "b"}))


def test_a_well_formed_docstring_has_no_problems():
    text = "It.\n\nArgs:\n    a: One,\n        and more: much.\n    b: Two.\n\nReturns:\n    A: it."
    assert problems(text, {"a", "b"}) == []
