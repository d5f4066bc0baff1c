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
            f"{file} does not exist: the folder of a pretrained model must hold {what} there. Name "
            "a folder of this machine; tpudist downloads nothing."
        ) from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}. Download it again.") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{file} holds a {type(found).__name__}, not an object. Download it again."
        )
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
                f"{index} names {len(names)} files, but {len(missing)} of them are missing: "
                f"{', '.join(missing[:3])}. Download them too."
            )
        if WEIGHTS not in names and (folder / WEIGHTS).exists():
            raise ValueError(
                f"{folder} holds both {WEIGHTS} and {INDEX}, which names other files: libraries "
                "differ in which one they read. Remove the wrong one."
            )
        return [folder / name for name in names]
    if not (folder / WEIGHTS).exists():
        raise FileNotFoundError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}. tpudist reads weights only from "
            "safetensors. Convert other formats, such as pickle, first."
        )
    return [folder / WEIGHTS]


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder, by name."""
    found: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        found |= read_header(file)[1]
    return found
