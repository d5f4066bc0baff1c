"""Adds files outside docs/ to the site, and rewrites links between files of the repository.

A link in Markdown names a file as it lies in the repository, which is right on GitHub. Links are
rewritten where a page is made, never in the source. docs/index.md is made of sections of README.md:
a line `--8<-- "README.md:NAME"` stands for the section NAME, with its links.
"""

from __future__ import annotations

import posixpath
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    # One page for each package that explains its idea, such as packages/lowering.md.
    **{
        file.relative_to(ROOT).as_posix(): f"packages/{file.parent.name}.md"
        for file in sorted((ROOT / "tpudist").rglob("README.md"))
    },
}
IN_REPOSITORY = {site: path for path, site in PAGES.items()}
# Files that are not pages: a link to such a file leads to the page that shows its text.
SHOWN_BY = {"README.md": "index.md", "examples/README.md": "examples.md"}
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
_SNIPPET = re.compile(r'^([ ]*)--8<-- "([^":]+\.md):([\w-]+)"$', re.M)
_SECTION = r"<!-- --8<-- \[start:{0}\] -->\n(.*?)<!-- --8<-- \[end:{0}\] -->"
_PICTURE = re.compile(
    r'^<picture>\n.*?<img alt="([^"]*)" src="([^"]*)-light\.svg">\n</picture>$', re.M | re.S
)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages, and the notebooks and examples as files to download."""
    from mkdocs.structure.files import File

    downloads = [*(ROOT / "colab").glob("*.ipynb"), *(ROOT / "examples").rglob("*.py")]
    names = [path.relative_to(ROOT).as_posix() for path in sorted(downloads)]
    for path in (*PAGES, *names):
        files.append(File.generated(config, path_on_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Inserts the sections of other files, and rewrites the links of a page."""
    here = page.file.src_uri
    path = IN_REPOSITORY.get(here, f"docs/{here}")
    return with_sections(with_links(markdown, path), path)


def path_on_site(path: str) -> str:
    """Returns the path on the site of a file of the repository."""
    return PAGES.get(path) or SHOWN_BY.get(path) or path.removeprefix("docs/")


def with_links(markdown: str, path: str, page: str | None = None) -> str:
    """Returns a text with its links to files of the repository as the site has them.

    Args:
        markdown: The text.
        path: File of the repository that the text is from.
        page: File of the repository whose page shows the text (default: `path`).
    """
    folder = posixpath.dirname(path_on_site(page or path)) or "."

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[1]))
        if not (ROOT / target).is_file():
            return found[0]
        to = posixpath.relpath(path_on_site(target), folder)
        return f"]({to}{found[2] or ''})"

    return _LINK.sub(link, markdown)


def with_sections(markdown: str, page: str) -> str:
    """Returns the text of a page with the sections of other files that it names.

    Pictures of the sections get the two variants that the site's switch of colors shows and hides.

    Args:
        markdown: The text.
        page: File of the repository whose page shows the text.
    """

    def section(found: re.Match[str]) -> str:
        indent, path, name = found.groups()
        inside = re.search(_SECTION.format(name), (ROOT / path).read_text(), re.S)
        assert inside is not None, f"{page}: {path} has no section {name!r}"
        text = _PICTURE.sub(
            r"![\1](\2-light.svg#only-light)\n![\1](\2-dark.svg#only-dark)", inside[1]
        )
        return textwrap.indent(with_links(text, path, page), indent)

    return _SNIPPET.sub(section, markdown)
