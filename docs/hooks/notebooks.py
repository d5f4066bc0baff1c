"""Shows each notebook of `colab/` as a page, with the outputs that are stored in it.

Nothing is executed: `scripts/notebook_outputs.py` stores the outputs. The first notebook is the
page Quickstart; `docs/quickstart.md` is for readers on GitHub. Links to notebooks lead to pages.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
QUICKSTART = "01_quickstart"
_WIDEST = 115  # columns that `rich` prints in a notebook
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
_TO_NOTEBOOK = re.compile(r"\]\((?:[^)\s#]*/)?colab/(\w+)\.ipynb(#[^)\s]*)?\)")


def page_of(name: str) -> str:
    """Returns the path of a notebook's page on the site."""
    return "quickstart.md" if name == QUICKSTART else f"notebooks/{name}.md"


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the notebooks, and their images."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "colab").glob("*.ipynb")):
        markdown, images = render(path, config["repo_url"] or "")
        for uri, content in {page_of(path.stem): markdown, **images}.items():
            if found := files.get_file_from_path(uri):
                files.remove(found)
            files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Makes links to notebooks lead to their pages."""
    return link_to_pages(markdown, page.file.src_uri)


def link_to_pages(markdown: str, page: str) -> str:
    """Returns the text of a page, with links to the pages of notebooks.

    Args:
        markdown: The text. The link `Download` of a notebook's page is not changed.
        page: Path of the page on the site.
    """

    def link(found: re.Match[str]) -> str:
        to = page_of(found[1])
        return found[0] if to == page else f"]({_relative(to, page)}{found[2] or ''})"

    return _TO_NOTEBOOK.sub(link, markdown)


def render(path: Path, address: str = "") -> tuple[str, dict[str, bytes]]:
    """Returns a notebook as Markdown, and its images by their paths on the site.

    Args:
        path: The notebook.
        address: Public address of the repository on GitHub; empty if it has none.
    """
    cells = json.loads(path.read_text())["cells"]
    page, images, parts = page_of(path.stem), {}, []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_with_links(source, page))
        elif "colab" not in cell["metadata"].get("tags", []):
            parts.append(_fence("python", source))
            for output in cell["outputs"]:
                if picture := output.get("data", {}).get("image/png"):
                    uri = posixpath.splitext(page)[0] + f"_{len(images) + 1}.png"
                    images[uri] = base64.b64decode("".join(picture))
                    parts.append(f"![Figure {len(images)}]({posixpath.basename(uri)})")
                else:
                    text = output.get("text") or output["data"]["text/plain"]
                    parts.append(_fence("text", _wrap("".join(text))))
    title, _, rest = parts[0].partition("\n")
    return "\n\n".join([title, _links(path.stem, page, address), rest.strip(), *parts[1:]]), images


def _links(name: str, page: str, address: str) -> str:
    """Returns the line below the title of a page."""
    links = []
    if repository := re.fullmatch(r"https://github\.com/([^/]+/[^/]+?)(\.git)?/?", address):
        colab = f"https://colab.research.google.com/github/{repository[1]}"
        links.append(f"[Open in Colab]({colab}/blob/main/colab/{name}.ipynb)")
    links.append(f"[Download this notebook]({_relative(f'colab/{name}.ipynb', page)})")
    links.append(f"[Install tpudist]({_relative('installation.md', page)})")
    return " · ".join(links)


def _with_links(markdown: str, page: str) -> str:
    """Returns a cell whose links lead to pages of the site; in a notebook, they lead to files."""

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("colab", found[1]))
        if not (ROOT / target).is_file():
            return found[0]
        if target.startswith("colab/"):
            target = page_of(Path(target).stem)
        else:
            target = target.removeprefix("docs/")
        return f"]({_relative(target, page)}{found[2] or ''})"

    return _LINK.sub(link, markdown)


def _relative(target: str, page: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def _wrap(text: str) -> str:
    """Returns an output whose sentences fit on a page. Tables have at most `_WIDEST` columns."""
    lines: list[str] = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapped = textwrap.wrap(
            line, 92, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines += wrapped if len(line) > _WIDEST else [line]
    return "\n".join(lines)


def _fence(language: str, text: str) -> str:
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
