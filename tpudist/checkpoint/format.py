"""The files of a checkpoint, and how one of ours is known."""

import json
from typing import Any

from etils import epath

ARRAYS, CONTENTS = "state", "tpudist"  # the items of a step, in Orbax's words
FORMAT = 1
_JSON_FILE = "metadata"


def read_contents(path: epath.Path) -> Any:
    """The JSON of a step."""
    return json.loads((path / CONTENTS / _JSON_FILE).read_text())


def read_notes(path: epath.Path) -> dict[str, int]:
    """What else was noted in a step."""
    return dict(read_contents(path).get("notes", {})) if is_ours(path) else {}


def is_ours(path: epath.Path) -> bool:
    """Whether a step was written by this package."""
    return (path / CONTENTS).exists()
