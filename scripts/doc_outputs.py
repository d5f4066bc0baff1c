"""Runs the Python blocks of pages, and stores the output of each block below it.

`python scripts/doc_outputs.py docs/losses.md` rewrites the outputs of a page that are out of date.

A `text` block that follows a `python` block, with only empty lines between them, is the output of
that block. In a stored output, `...` stands for any text on a line, and a line with only `...`
stands for any number of lines. Numbers with a decimal point may differ by 1%; all else must match.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.M | re.S)
_NUMBER = re.compile(r"[-+]?\d+\.\d*(?:[eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+")
_MARK = "\x1eblock\n"
TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Block:
    """One Python block of a page.

    Attributes:
        code: Source of the block.
        output: Stored output, or None if no output block follows.
        start: Offset of the block in the page.
        end: Offset of the end of the block and its output.
    """

    code: str
    output: str | None
    start: int
    end: int


def find_blocks(text: str) -> list[Block]:
    """Returns the Python blocks of a page in Markdown, in order."""
    return [Block(x[1], x[2], x.start(), x.end()) for x in _BLOCK.finditer(text)]


def run_blocks(codes: list[str], folder: Path) -> list[str]:
    """Runs blocks one after the other in one process, and returns the output of each.

    Args:
        codes: Sources of the blocks.
        folder: Working directory of the process.

    Raises:
        RuntimeError: If the process fails or warns.
    """
    program = "".join(f"{code}\nprint({_MARK[:-1]!r}, flush=True)\n" for code in codes)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout.split(_MARK)[: len(codes)]


def find_difference(stored: str, printed: str) -> str | None:
    """Returns the first line of a stored output that a new output does not match, or None."""
    expected, found = stored.rstrip().splitlines(), printed.rstrip().splitlines()
    return _find_difference(expected, found)


def _find_difference(expected: list[str], found: list[str]) -> str | None:
    for at, line in enumerate(expected):
        if line.strip() == "...":
            rest = expected[at + 1 :]
            if any(_find_difference(rest, found[x:]) is None for x in range(at, len(found) + 1)):
                return None
            return f"stored {line!r} and {len(rest)} lines more, printed {found[at:]}"
        if at >= len(found) or not _matches(line, found[at]):
            return f"stored {line!r}, printed {found[at] if at < len(found) else 'nothing'!r}"
    if len(found) > len(expected):
        return f"stored nothing, printed {found[len(expected)]!r}"
    return None


def _matches(stored: str, printed: str) -> bool:
    pattern = ".*".join(
        _NUMBER.pattern.join(f"(?:{_escape(x)})" for x in _NUMBER.split(part)).replace(
            _NUMBER.pattern, f"({_NUMBER.pattern})"
        )
        for part in stored.rstrip().split("...")
    )
    found = re.fullmatch(pattern, printed.rstrip())
    numbers = [float(x) for part in stored.split("...") for x in _NUMBER.findall(part)]
    return found is not None and all(
        abs(float(new) - old) <= TOLERANCE * abs(old) + 1e-9
        for new, old in zip(found.groups(), numbers, strict=True)
    )


def _escape(text: str) -> str:
    """Returns a pattern for a text in which runs of spaces may have any length."""
    return re.sub(r"(?:\\ )+", " *", re.escape(text))


def update(page: Path) -> int:
    """Rewrites the outputs of a page that are out of date, and returns how many it rewrote."""
    text = page.read_text()
    blocks = find_blocks(text)
    with tempfile.TemporaryDirectory() as folder:
        outputs = run_blocks([x.code for x in blocks], Path(folder))
    changed = 0
    for block, printed in reversed(list(zip(blocks, outputs, strict=True))):
        if find_difference(block.output or "", printed):
            new = f"```python\n{block.code}```"
            new += f"\n\n```text\n{printed.rstrip()}\n```" if printed.strip() else ""
            text = text[: block.start] + new + text[block.end :]
            changed += 1
    page.write_text(text)
    return changed


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {update(Path(name))} outputs rewritten")
