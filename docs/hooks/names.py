"""Links public names in running text to their entries in the reference.

`MirroredStrategy`, `tpudist.emulate(8)` and `strategy.run` become links wherever they are between
backticks, in guides and in docstrings. The sources need no markup.

In the reference, code above an entry becomes the first part of the entry, below its heading.
"""

import re
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parents[1] / "reference"
DOCUMENTED = set(
    re.findall(
        r"^::: tpudist\.(\S+)",
        "\n".join(page.read_text() for page in REFERENCE.glob("*.md")),
        re.M,
    )
)
# Names of objects in examples.
OBJECTS = {
    "strategy": "Strategy",
    "manager": "checkpoint.CheckpointManager",
    "plan": "planner.Plan",
}
_CODE = re.compile(r"<code>([A-Za-z_][\w.]*)((?:\(.*?\))?)</code>")
# A block of code of a page (not a signature), and the start of an entry with its heading.
_EXAMPLE = r'<div class="(?!doc-)[^"]*highlight">(?:(?!</div>).)*</div>\s*'
_ENTRY = r'<div class="doc doc-object [^"]*">\s*<h\d [^>]*class="doc doc-heading">.*?</h\d>\s*'
_EXAMPLES_AND_ENTRY = re.compile(f"((?:{_EXAMPLE})+)({_ENTRY})", re.DOTALL)
_HEADING_OR_LINK = re.compile(r"(<(?P<tag>h[1-6]|a|pre)\b.*?</(?P=tag)>)", re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """Links the names on a page that are not in a heading or a link."""
    parts = _HEADING_OR_LINK.split(move_examples(html))
    # Between two parts come the heading or link, and its tag.
    parts[::3] = [_CODE.sub(_link, part) for part in parts[::3]]
    return "".join(part for i, part in enumerate(parts) if i % 3 != 2)


def move_examples(html: str) -> str:
    """Moves the blocks of code directly above an entry of the reference below its heading."""
    return _EXAMPLES_AND_ENTRY.sub(r"\2\1", html)


def _link(code: re.Match[str]) -> str:
    name = identifier(code[1])
    return f'<autoref optional identifier="{name}">{code[0]}</autoref>' if name else code[0]


def identifier(text: str) -> str | None:
    """Returns the name of the reference for a name in running text, or None if it is not public.

    A word without a capital is a public name only after its module: `tpudist.function`.
    """
    first, _, rest = text.partition(".")
    if first == "tpudist":
        name = rest
    elif first in OBJECTS and rest:
        name = f"{OBJECTS[first]}.{rest}"
    elif text[0].isupper() or rest:
        name = text
    else:
        return None
    owner = name
    while owner and owner not in DOCUMENTED:
        owner = owner.rpartition(".")[0]
    return f"tpudist.{name}" if owner else None
