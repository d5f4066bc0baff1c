"""The files of a checkpoint, and how one of ours is known."""

import json
from typing import Any

from etils import epath

from tpudist.checkpoint.errors import CheckpointError

ARRAYS, CONTENTS = "state", "tpudist"  # the items of a step, in Orbax's words
FORMAT = 1
_JSON_FILE = "metadata"


def read_contents(path: epath.Path) -> Any:
    """The JSON of a step."""
    return json.loads((path / CONTENTS / _JSON_FILE).read_text())


def read_valid_contents(path: epath.Path) -> dict[str, Any]:
    """The JSON of a step that is to be restored.

    Raises:
        CheckpointError: It cannot be read, or lacks a part, so that nothing can be restored.
    """
    try:
        contents = read_contents(path)
        for leaf in contents["leaves"].values():
            has_array = "value" not in leaf and 0 not in leaf["shape"]
            _ = [leaf[key] for key in ("kind", "dtype", *(["path"] if has_array else []))]
        _ = dict(contents["aliases"]), int(contents["step"]), dict(contents.get("notes", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"The file {CONTENTS}/{_JSON_FILE} of the checkpoint {path} is damaged "
            f"({type(error).__name__}: {error}). It describes the arrays, so nothing was "
            f"restored, and verify=False does not help. Restore another checkpoint."
        ) from error
    return contents


def read_notes(path: epath.Path) -> dict[str, int]:
    """What else was noted in a step."""
    return dict(read_valid_contents(path).get("notes", {})) if is_ours(path) else {}


def is_ours(path: epath.Path) -> bool:
    """Whether a step was written by this package."""
    return (path / CONTENTS).exists()
