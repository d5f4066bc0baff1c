"""Writes the index of errors: all classes and messages of the library, read from its sources.

A page marks the places with `<!-- errors: classes -->` and `<!-- errors: messages -->`. The hook
parses the sources and imports nothing, so the page always matches the sources of the build.
"""

import ast
import functools
import html
import re
from pathlib import Path
from typing import Any, NamedTuple

from error_texts import LOG, REASON, Sources, Text

PACKAGE = Path(__file__).parents[2] / "tpudist"
_ASKED = re.compile(r"^<!-- errors: (classes|messages) -->$", re.MULTILINE)
_REMEDY = "Remedy: "

# What the user did, the guide for it, and the files whose messages this causes, as prefixes of
# their paths. The longest prefix that fits a file decides.
GROUPS = (
    ("Create a strategy and choose devices", "installation", "strategies strategy context xla"),
    ("Run a step", "debugging", "run programs lowering values options"),
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
    ("Use an old name", "reference/old_names", "compat __init__.py"),
)


class ErrorClass(NamedTuple):
    """A class of errors or warnings."""

    name: str
    bases: tuple[str, ...]
    cause: str
    """The first paragraph of its docstring."""
    remedy: str
    """The paragraph that begins with "Remedy: "; empty for an internal class."""


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
    return _read(package)[0]


def find_messages(package: Path) -> dict[tuple[str, str, str], list[Text]]:
    """Returns the errors, warnings and log lines of each group, in the order of files.

    Each text is there once, with the class of the error if that is known. A text that is a part of
    another one of its file is left out.
    """
    names: dict[tuple[str, str], str] = {}
    for name, text, file in _read(package)[1]:
        if names.get((file, text), REASON) in (REASON, LOG):
            names[file, text] = name
    found: dict[tuple[str, str, str], list[Text]] = {group: [] for group in GROUPS}
    for (file, text), name in names.items():
        part = text.removeprefix("... ").removesuffix(" ...")
        if not any(part in other for where, other in names if where == file and other != text):
            found[find_group(file)].append(Text(name, text, file))
    return found


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


@functools.cache
def _read(package: Path) -> tuple[list[ErrorClass], list[Text]]:
    classes, sources = [], Sources(package)
    for node in filter(sources.is_error, sources.classes):
        paragraphs = (ast.get_docstring(node) or "").split("\n\n")
        remedies = [x.removeprefix(_REMEDY) for x in paragraphs if x.startswith(_REMEDY)]
        cause, remedy = (" ".join(x.split()) for x in (paragraphs[0], *remedies, "")[:2])
        bases = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
        classes.append(ErrorClass(node.name, bases, cause, remedy))
    return sorted(classes), list(sources.texts())
