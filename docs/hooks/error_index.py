"""Every error of the library, as its sources say it: classes, and what they are raised with.

A page asks for them with `<!-- errors: classes -->` and `<!-- errors: messages -->`. Nothing is
imported: what is written is read, so the page is that of the sources that it is built from.
"""

import ast
import builtins
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[2] / "tpudist"
_ASKED = re.compile(r"^<!-- errors: (classes|messages) -->$", re.MULTILINE)
_REMEDY = "Remedy: "
_REFUSED = "refused"


class ErrorClass(NamedTuple):
    """A class of errors or warnings that users meet."""

    name: str
    bases: tuple[str, ...]
    cause: str
    """The first paragraph of its docstring."""
    remedy: str
    """The paragraph that begins with "Remedy: "; empty for a class that nobody meets."""


class Message(NamedTuple):
    """What an error or a warning says, with `...` for what is only known when it is raised."""

    name: str
    text: str
    file: str


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the lists where they are asked for."""
    lists = {"classes": show_classes, "messages": show_messages}
    return _ASKED.sub(lambda asked: lists[asked[1]](PACKAGE), markdown)


def show_classes(package: Path) -> str:
    """A table: class, cause and remedy."""
    rows = ["| class | cause | remedy |", "|---|---|---|"]
    for found in find_classes(package):
        if found.remedy:
            cells = (f"`{found.name}` ({', '.join(found.bases)})", found.cause, found.remedy)
            rows.append(f"| {' | '.join(x.replace('|', '&#124;') for x in cells)} |")
    return "\n".join(rows)


def show_messages(package: Path) -> str:
    """A list for each package: class, message and file."""
    parts = []
    for name, messages in find_messages(package).items():
        items = "\n".join(
            f"<li><code>{x.name}</code> {html.escape(x.text)} <small>{x.file}</small></li>"
            for x in messages
        )
        parts.append(f"### {name}\n\n<ul>\n{items}\n</ul>")
    return "\n\n".join(parts)


def find_classes(package: Path) -> list[ErrorClass]:
    """All classes of errors and warnings, by name."""
    found = []
    classes = [
        node
        for _, tree in _modules(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    errors = {x for x, it in vars(builtins).items() if isinstance(it, type)}
    errors = {x for x in errors if issubclass(getattr(builtins, x), BaseException)}
    while new := {c.name for c in classes if {_last(b) for b in c.bases} & errors} - errors:
        errors |= new
    for node in classes:
        if {_last(base) for base in node.bases} & errors:
            paragraphs = (ast.get_docstring(node) or "").split("\n\n")
            remedies = [x.removeprefix(_REMEDY) for x in paragraphs if x.startswith(_REMEDY)]
            cause, remedy = (" ".join(x.split()) for x in (paragraphs[0], *remedies, "")[:2])
            bases = tuple(_last(base) for base in node.bases)
            found.append(ErrorClass(node.name, bases, cause, remedy))
    return sorted(found)


def find_messages(package: Path) -> dict[str, list[Message]]:
    """Returns the errors and warnings of each package, each message once, in the order of files.

    Only messages that are written where they are raised; a few are put together elsewhere.
    """
    packages: dict[str, dict[Message, None]] = {}
    for file, tree in _modules(package):
        name = file.split("/")[0].removesuffix(".py")
        lines = [
            (getattr(x, "lineno", 0), message)
            for x in ast.walk(tree)
            for message in _message(x, file)
        ]
        for _, message in sorted(lines, key=lambda found: found[0]):
            packages.setdefault(name, {})[message] = None
    return {name: list(messages) for name, messages in packages.items()}


def _message(node: ast.AST, file: str) -> Iterator[Message]:
    """What a statement or call says, if it raises, refuses or warns in words of its own."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        call, name = node.exc, _last(node.exc.func)
    elif isinstance(node, ast.Call) and _last(node.func) == "refuse":
        call, name = node, _REFUSED
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
        category = [x.value for x in node.keywords if x.arg == "category"] or node.args[1:2]
        call, name = node, _last(category[0]) if category else "UserWarning"
    else:
        return
    for text in map(_text, call.args):
        if " " in text.strip(". "):
            # What makes the error, where it is not its class, says nothing to who meets it.
            yield Message(name if name[0].isupper() else _REFUSED, " ".join(text.split()), file)
            return


def _text(node: ast.expr) -> str:
    """A string as it is written; empty for what is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(x) if isinstance(x, ast.Constant) else "..." for x in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_text(node.left), _text(node.right)]
        return "".join(x or "..." for x in sides) if any(sides) else ""
    return ""


def _modules(package: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).as_posix(), ast.parse(path.read_text())


def _last(node: ast.expr) -> str:
    """`b` of `a.b`."""
    return ast.unparse(node).rpartition(".")[2]
