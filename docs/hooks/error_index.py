"""Writes the index of errors: all classes and messages of the library, read from its sources.

A page marks the places with `<!-- errors: classes -->` and `<!-- errors: messages -->`. The hook
parses the sources and imports nothing, so the page always matches the sources of the build.
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
_REASON = "reason"

# What the user did, the guide for it, and the files whose messages this causes, as prefixes of
# their paths. The longest prefix that fits a file decides.
GROUPS = (
    ("Create a strategy and choose devices", "installation", "strategies strategy context xla"),
    ("Run a step", "debugging", "run programs lowering values options.py"),
    ("Create, read or assign a variable", "reference/values", "state"),
    (
        "Reduce or gather values",
        "reference/communication",
        "reductions reduce_op.py xla/collectives.py xla/communication_options.py",
    ),
    ("Compute losses and gradients", "losses", "gradients"),
    ("Distribute data", "data_pipelines", "input protobuf_wire.py"),
    ("Save, restore or survive", "checkpoints", "checkpoint preemption"),
    ("Use Keras", "keras_fit", "keras"),
    ("Build or load a model", "pretrained", "models xla/splash_attention.py"),
    ("Use the training loop", "training_loop", "training"),
    ("Start several processes", "several_processes", "cluster_resolver processes supervisor"),
    ("Use parameter servers", "parameter_servers", "coordinator ps engine"),
    (
        "Plan a step",
        "planning",
        "planner xla/compiler xla/hlo xla/hardware xla/topology.py cli/plan_command.py "
        "cli/reference.py cli/user_step.py cli/topologies_command.py",
    ),
    ("Verify or test a step", "verification", "verification testing pytest_plugin"),
    ("Run another command", "reference/command_line", "cli port goodput"),
)


class ErrorClass(NamedTuple):
    """A class of errors or warnings."""

    name: str
    bases: tuple[str, ...]
    cause: str
    """The first paragraph of its docstring."""
    remedy: str
    """The paragraph that begins with "Remedy: "; empty for an internal class."""


class Message(NamedTuple):
    """Text of an error or a warning, with `...` for each part that is computed."""

    name: str
    text: str
    file: str


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces each mark of a page by its list."""
    lists = {"classes": show_classes, "messages": show_messages}
    return _ASKED.sub(lambda asked: lists[asked[1]](PACKAGE), markdown)


def show_classes(package: Path) -> str:
    """Returns a table with class, cause and remedy."""
    rows = ["| class | cause | remedy |", "|---|---|---|"]
    for found in find_classes(package):
        if found.remedy:
            remedy = found.remedy[0].upper() + found.remedy[1:]
            cells = (f"`{found.name}` ({', '.join(found.bases)})", found.cause, remedy)
            rows.append(f"| {' | '.join(x.replace('|', '&#124;') for x in cells)} |")
    return "\n".join(rows)


def show_messages(package: Path) -> str:
    """Returns a list for each group: class, message and file."""
    parts = []
    for (title, guide, _), messages in find_messages(package).items():
        items = "\n".join(
            f"<li><code>{x.name}</code> {html.escape(x.text)} <small>{x.file}</small></li>"
            for x in messages
        )
        parts.append(f"### {title}\n\n[Guide]({guide}.md)\n\n<ul>\n{items}\n</ul>")
    return "\n\n".join(parts)


def find_classes(package: Path) -> list[ErrorClass]:
    """Returns all classes of errors and warnings, by name."""
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


def find_messages(package: Path) -> dict[tuple[str, str, str], list[Message]]:
    """Returns the errors and warnings of each group, each message once, in the order of files.

    The result has only messages that are written where they are raised; a few are composed
    elsewhere.
    """
    found: dict[tuple[str, str, str], dict[Message, None]] = {group: {} for group in GROUPS}
    for file, tree in _modules(package):
        lines = [
            (getattr(x, "lineno", 0), message)
            for x in ast.walk(tree)
            for message in _message(x, file)
        ]
        for _, message in sorted(lines, key=lambda found: found[0]):
            found[find_group(file)][message] = None
    return {group: list(messages) for group, messages in found.items()}


def find_group(file: str) -> tuple[str, str, str]:
    """Returns the group of a file of the package.

    Raises:
        ValueError: If no group has a prefix of the file's path.
    """
    fits = [
        (len(prefix), group)
        for group in GROUPS
        for prefix in group[2].split()
        if f"{file}/".startswith(f"{prefix}/")
    ]
    if not fits:
        raise ValueError(f"{file} raises errors: name its package in GROUPS, in {__file__}.")
    return max(fits)[1]


def _message(node: ast.AST, file: str) -> Iterator[Message]:
    """Yields the message of a statement or call that raises, refuses or warns with a text."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        call, name = node.exc, _last(node.exc.func)
    elif isinstance(node, ast.Call) and _last(node.func) == "refuse":
        call, name = node, _REASON
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
        category = [x.value for x in node.keywords if x.arg == "category"] or node.args[1:2]
        call, name = node, _last(category[0]) if category else "UserWarning"
    else:
        return
    for text in map(_text, call.args):
        if " " in text.strip(". "):
            # A function that creates the error has no name that helps a reader.
            yield Message(name if name[0].isupper() else _REASON, " ".join(text.split()), file)
            return


def _text(node: ast.expr) -> str:
    """Returns a string as written, or an empty one for an expression that is not a string."""
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
    """Returns `b` of `a.b`."""
    return ast.unparse(node).rpartition(".")[2]
