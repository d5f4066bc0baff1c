"""Finds the objects that match a pattern, folder by folder and page by page."""

import asyncio
import dataclasses
import fnmatch
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")
_MAGIC = frozenset("*?[")
_ALL_FOLDERS = "**"


@dataclasses.dataclass(frozen=True)
class Page(Generic[_T]):
    """A part of the listing of a folder.

    Attributes:
        objects: URLs of objects, and facts about each.
        folders: URLs of folders in the folder, which end in "/".
        token: Name of the next page; None for the last one.
    """

    objects: dict[str, _T]
    folders: list[str]
    token: str | None


async def find_matches(
    list_page: Callable[[str, bool, str | None], Awaitable[Page[_T]]], pattern: str
) -> dict[str, _T]:
    """Returns the objects that match a pattern, in the order in which they are found.

    Args:
        list_page: Called with the start of URLs, whether objects in folders below the next "/"
            belong to the listing, and the token of the page. If they do, it may return their
            folders instead of them.
        pattern: URL with `*`, `?`, `[..]` in names, or `**` for any number of folders.

    Raises:
        ValueError: If `**` is only a part of a name.
    """
    scheme, _, path = pattern.partition("://")
    root, *patterns = path.split("/")
    if not patterns:
        raise ValueError(f"{pattern}: only names in a bucket can be patterns. Add `/` and a name.")
    if any(_ALL_FOLDERS in x and x != _ALL_FOLDERS for x in patterns):
        raise ValueError(
            f"{pattern.partition('?')[0]}: `**` stands for whole folders, such as in `a/**/*.txt`. "
            "Use `*` for a part of a name."
        )
    found: dict[str, _T] = {}

    def is_match(url: str) -> bool:
        # Without scheme and host, which may be an IPv6 address in brackets.
        return _match_names(url.split("/")[3:], patterns)

    async def list_pages(start: str, is_deep: bool) -> list[str]:
        folders, token = [], None
        while True:
            page = await list_page(start, is_deep, token)
            # An object whose name ends in "/" stands for a folder.
            found_here = {k: v for k, v in page.objects.items() if not k.endswith("/")}
            found.update({k: v for k, v in found_here.items() if is_match(k)})
            folders += page.folders
            token = page.token
            if token is None:
                return folders

    async def expand(folder: str, names: Sequence[str]) -> None:
        name, *later = names
        if name == _ALL_FOLDERS:
            # Ends: a store lists all at once, and links on web pages lead to folders below only.
            below = await list_pages(folder, is_deep=True)
            await asyncio.gather(*(expand(x, names) for x in below))
        elif later and not _MAGIC.intersection(name):
            await expand(f"{folder}{name}/", later)
        else:
            found_folders = await list_pages(folder + _literal_start(name), is_deep=False)
            if later:
                matching = [x for x in found_folders if fnmatch.fnmatchcase(x.split("/")[-2], name)]
                await asyncio.gather(*(expand(x, later) for x in matching))

    await expand(f"{scheme}://{root}/", patterns)
    return found


def _literal_start(name: str) -> str:
    return name[: next((i for i, x in enumerate(name) if x in _MAGIC), len(name))]


def _match_names(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns or not names:
        return not patterns and not names
    if patterns[0] == _ALL_FOLDERS:
        # The last `**` matches all objects below; another one any number of folders, also none.
        if len(patterns) == 1:
            return True
        return any(_match_names(names[i:], patterns[1:]) for i in range(len(names)))
    is_match = fnmatch.fnmatchcase(names[0], patterns[0])
    return is_match and _match_names(names[1:], patterns[1:])
