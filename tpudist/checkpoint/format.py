"""Reads the JSON of a checkpoint, which describes everything in it except the arrays.

    {"format": 1, "step": 7, "time": 1764340000.5, "metrics": {"loss": 0.5}, "notes": {},
     "aliases": {"decoder.w": "encoder.w"},
     "leaves": {"encoder.w": {"kind": "array", "shape": [3, 4], "dtype": "float32",
                              "path": ["encoder", "w"]},
                "step": {"kind": "value", "shape": [], "dtype": "int", "value": 7}}}

A checkpoint is a directory with this JSON (`tpudist/metadata`), Orbax's item with the arrays
(`state/`), and the manifest with checksums.
"""

import json
from typing import Any

from etils import epath

from tpudist.checkpoint.errors import CheckpointError

ARRAYS, CONTENTS = "state", "tpudist"  # the two items of a step, which are directories
# Orbax appends it to the names of a step and of its items until they are complete.
TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
FORMAT = 1
_JSON_FILE = "metadata"


def read_contents(path: epath.Path) -> Any:
    """Returns the JSON of a step, unchecked."""
    return json.loads((path / CONTENTS / _JSON_FILE).read_text())


def read_valid_contents(path: epath.Path) -> dict[str, Any]:
    """Returns the JSON of a step, after checking that everything needed to restore is in it.

    Raises:
        CheckpointError: If it cannot be read, or lacks a part.
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
    """Returns the notes of a step."""
    return dict(read_valid_contents(path).get("notes", {})) if is_ours(path) else {}


def is_ours(path: epath.Path) -> bool:
    """Whether a step was written by this package."""
    return (path / CONTENTS).exists()
