"""Files of the repository that are pages of the site without being in docs/, and links to them.

A link in Markdown names a file as it lies in the repository, which is right on GitHub. The site has
README.md as its front page, so links are rewritten where a page is made, never in the source.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
IN_REPOSITORY = {site: path for path, site in PAGES.items()}
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages, and the notebooks as files to load down."""
    from mkdocs.structure.files import File

    notebooks = [f"colab/{path.name}" for path in sorted((ROOT / "colab").glob("*.ipynb"))]
    for path in (*PAGES, *notebooks):
        files.append(File.generated(config, path_on_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Has the links of a page lead to where the site has what they name."""
    here = page.file.src_uri
    return with_links(markdown, IN_REPOSITORY.get(here, f"docs/{here}"))


def path_on_site(path: str) -> str:
    """Where the site has a file of the repository."""
    return PAGES.get(path, path.removeprefix("docs/"))


def with_links(markdown: str, path: str) -> str:
    """The text of a file of the repository, with its links to other files as the site has them."""

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[1]))
        if not (ROOT / target).is_file():
            return found[0]
        to = posixpath.relpath(path_on_site(target), posixpath.dirname(path_on_site(path)) or ".")
        return f"]({to}{found[2] or ''})"

    return _LINK.sub(link, markdown)
