"""The folder of a pretrained model: `config.json`, files of tensors, a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tpudist.models.pretrained.safetensors_file import StoredTensor, read_header

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"


def read_json(file: Path, content: str) -> dict[str, Any]:
    """Returns the object in a JSON file of the folder.

    Args:
        file: Path of the file.
        content: Description of its content, for a message.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file is not JSON, or not an object.
    """
    try:
        values = json.loads(file.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file} does not exist: the folder of a pretrained model must hold {content} there. "
            "Name a folder of this machine; tpudist downloads nothing."
        ) from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}. Download it again.") from error
    if not isinstance(values, dict):
        raise ValueError(
            f"{file} holds a {type(values).__name__}, not an object. Download it again."
        )
    return values


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of tensors.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If there are two sets of files.
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
    """Returns all tensors of a folder, by name; see `plain_name`."""
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        tensors |= {plain_name(name): tensor for name, tensor in read_header(file)[1].items()}
    return tensors


def plain_name(tensor: str) -> str:
    """Returns the name of a tensor without the prefix that some files of gpt2 have."""
    return tensor.removeprefix("transformer.")
