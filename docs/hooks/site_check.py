"""Checks the links of the site, rejects requests to other hosts, and writes the archive.

After `mkdocs build`, the hook looks up every link of every page among the pages, anchors and files
of the site. A missing target or a request to another host ends the build with an error. MkDocs
itself checks only links in Markdown, not links that hooks and plugins write.
The site is then in `site/`, and the same as one file in `site.tar.gz`.
"""

import gzip
import re
import tarfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

ARCHIVE = "site.tar.gz"
HERE = "http://site"  # stands for wherever it is served from

# Requests of a browser that shows a page, by element; readers follow the other links.
_SHOWN = {("audio", "src"), ("embed", "src"), ("iframe", "src"), ("img", "src"), ("img", "srcset")}
_SHOWN |= {("link", "href"), ("object", "data"), ("script", "src"), ("source", "src")}
_SHOWN |= {("source", "srcset"), ("video", "src"), ("video", "poster")}
_NEVER_ASKED = {"canonical", "alternate", "next", "prev", "edit"}  # `rel` of a link that only says
_IN_STYLES = re.compile(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""")
# What Material's script asks other hosts for, where it finds this on a page.
_ASKS_OTHERS = re.compile(r'class="mermaid"|data-md-component="source"|data-md-component="consent"')


class Page(HTMLParser):
    """The links and anchors of a page.

    Attributes:
        links: Targets, each with whether the browser requests it automatically.
        anchors: Names that may follow `#`.
        unnamed: Images without alternative text.
    """

    def __init__(self, text: str):
        """Reads it."""
        super().__init__()
        self.links: list[tuple[str, bool]] = []
        self.anchors: set[str] = set()
        self.unnamed: list[str] = []
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Records the targets and the anchors of the element."""
        said = {name: value or "" for name, value in attrs}
        self.anchors |= {said[name] for name in ("id", "name") if name in said}
        self._in_style = tag == "style"
        if tag == "img" and not said.get("alt", "").strip():
            self.unnamed.append(said.get("src", ""))
        only_says = tag == "link" and said.get("rel") in _NEVER_ASKED
        for name, value in said.items():
            is_shown = (tag, name) in _SHOWN and not only_says
            if name == "srcset":
                self.links += [(x.split()[0], is_shown) for x in value.split(",")]
            elif is_shown or name == "href":
                self.links.append((value, is_shown))
            elif name == "style":
                self.links += [(link, True) for link in links_of_style(value)]

    def handle_data(self, data: str) -> None:
        """Records the targets that a style requests."""
        if self._in_style:
            self.links += [(link, True) for link in links_of_style(data)]


def links_of_style(text: str) -> list[str]:
    """Returns the targets that a style requests."""
    return [first or second for first, second in _IN_STYLES.findall(text)]


def problems(folder: Path) -> list[str]:
    """Returns the problems of a site, one sentence each."""
    files = {x.relative_to(folder).as_posix() for x in folder.rglob("*") if x.is_file()}
    texts = {name: (folder / name).read_text() for name in files if name.endswith(".html")}
    pages = {name: Page(text) for name, text in texts.items()}
    found = [
        f"{name} has an element for which the theme asks another host: {asks[0]}."
        for name, text in texts.items()
        if (asks := _ASKS_OTHERS.search(text))
    ]
    found += [
        f"{name} shows {image} without alternative text."
        for name, page in pages.items()
        for image in page.unnamed
    ]
    links = [(name, link, shown) for name, page in pages.items() for link, shown in page.links]
    for name in files:
        if name.endswith(".css"):
            style = (folder / name).read_text()
            links += [(name, link, True) for link in links_of_style(style)]
    for name, link, is_shown in links:
        found += _problems_of_link(name, link, is_shown, files, pages)
    return sorted(set(found))


def _problems_of_link(
    name: str, link: str, is_shown: bool, files: set[str], pages: dict[str, Page]
) -> list[str]:
    if urlsplit(link).scheme in ("data", "mailto"):
        return []
    target, anchor = urldefrag(urljoin(f"{HERE}/{name}", link))
    if not target.startswith(f"{HERE}/"):
        return [f"{name} asks another host for {link}."] if is_shown else []
    path = unquote(urlsplit(target).path).lstrip("/")
    path = f"{path}index.html" if path.endswith("/") or not path else path
    if path not in files:
        return [f"{name} leads to {link}, and there is no {path}."]
    if anchor and path in pages and unquote(anchor) not in pages[path].anchors:
        return [f"{name} leads to {link}, and {path} has no anchor {unquote(anchor)}."]
    return []


def write_archive(folder: Path, archive: Path) -> None:
    """Writes one file with the whole site; equal files give equal bytes."""
    with (
        gzip.GzipFile(archive, "wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted(x for x in folder.rglob("*") if x.is_file()):
            entry = tar.gettarinfo(path, path.relative_to(folder.parent))
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            with path.open("rb") as file:
                tar.addfile(entry, file)


def on_post_build(config: Any) -> None:
    """Ends the build of a site with problems; otherwise writes its archive."""
    from mkdocs.exceptions import PluginError

    folder = Path(config["site_dir"])
    if found := problems(folder):
        raise PluginError("\n".join(["The site is not whole:", *found]))
    if folder.parent == Path(config["config_file_path"]).parent:  # not while it is only served
        write_archive(folder, folder.parent / ARCHIVE)
