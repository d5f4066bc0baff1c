"""A folder of a pretrained model: `config.json`, tensors in one file or several, a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tpudist.models.pretrained.safetensors_file import StoredTensor, read_header

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"


def read_json(file: Path, what: str) -> dict[str, Any]:
    """The object that a JSON file of the folder holds.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is no JSON, or no object.
    """
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file} does not exist: the folder of a pretrained model holds {what} there. Name a "
            f"folder of this machine; nothing is fetched."
        ) from None
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}. Fetch it again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, not an object. Fetch it again.")
    return found


def weight_files(folder: Path) -> list[Path]:
    """The files of tensors.

    Raises:
        FileNotFoundError: There are none, or not all.
        ValueError: There are two sets of them.
    """
    index = folder / INDEX
    if index.exists():
        names = sorted(set(read_json(index, "its index")["weight_map"].values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise FileNotFoundError(
                f"{index} names {len(names)} files, of which {len(missing)} are not there: "
                f"{', '.join(missing[:3])}. Fetch them too."
            )
        if WEIGHTS not in names and (folder / WEIGHTS).exists():
            raise ValueError(
                f"{folder} holds both {WEIGHTS} and {INDEX}, which names other files: libraries "
                f"differ in which of them they read. Remove the one that is not meant."
            )
        return [folder / name for name in names]
    if not (folder / WEIGHTS).exists():
        raise FileNotFoundError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}. Weights are read from safetensors "
            f"alone; convert others, such as those of pickle, first."
        )
    return [folder / WEIGHTS]


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder, by name."""
    found: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        found |= read_header(file)[1]
    return found
