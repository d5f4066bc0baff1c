"""Writes the options of a command as a table, from the dataclass of its command line.

A page marks the place with `<!-- options: FILE CLASS -->`. The hook imports and starts nothing.
"""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_TYPES = {
    x.targets[0].id: x.value  # annotation of a type of several commands, by its name
    for x in ast.parse((ROOT / "tpudist/cli/option_types.py").read_text()).body
    if isinstance(x, ast.Assign) and isinstance(x.targets[0], ast.Name)
}
_ASKED = re.compile(r"^<!-- options: (\S+) (\w+) -->$", re.MULTILINE)
_SAID_DEFAULT = re.compile(r" \(default: ([^()]*|[^()]*\(\)[^()]*)\)(?=\.$)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces each mark of a page by its table."""
    return _ASKED.sub(lambda asked: table((ROOT / asked[1]).read_text(), asked[2]), markdown)


def table(source: str, name: str) -> str:
    """Returns a table with a row for each field of a class that has a description."""
    tree = ast.parse(source)
    (body,) = (x.body for x in ast.walk(tree) if isinstance(x, ast.ClassDef) and x.name == name)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for field, text in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            said = " ".join(ast.literal_eval(text.value).split()).replace("|", "\\|")
            default = _default(field)
            if not default and (found := _SAID_DEFAULT.search(said)):
                default = found[1] if " " in found[1] else f"`{found[1]}`"
                said = said.replace(found[0], "")
            rows.append(f"| {_option(field)} | {default} | {said} |")
    return "\n".join(rows)


def _option(field: ast.AnnAssign) -> str:
    name, annotation = ast.unparse(field.target), field.annotation
    if isinstance(annotation, ast.Attribute):
        annotation = _TYPES.get(annotation.attr, annotation)
    settings = {
        x.arg: ast.literal_eval(x.value)
        for call in ast.walk(annotation)
        if isinstance(call, ast.Call)
        for x in call.keywords
        if x.arg in ("aliases", "metavar")
    }
    metavar = settings.get("metavar", "")
    if "Positional" in ast.unparse(annotation):
        return f"`{metavar or name.upper()}`"
    names = [*settings.get("aliases", ()), f"--{name.replace('_', '-')}"]
    return ", ".join(f"`{x} {metavar}`" if metavar else f"`{x}`" for x in names)


def _default(field: ast.AnnAssign) -> str:
    if field.value is None:
        return "required"
    value = field.value
    if isinstance(value, ast.Call):  # Path("runs/latest")
        (value,) = value.args
    said = ast.literal_eval(value)
    if said in (None, (), ""):
        return ""
    if isinstance(said, tuple):
        said = " ".join(map(str, said))
    return {True: "on", False: "off"}[said] if isinstance(said, bool) else f"`{said}`"
