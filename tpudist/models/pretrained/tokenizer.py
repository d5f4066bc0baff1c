"""The tokenizer of a pretrained model."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from tpudist.models.pretrained.checkpoint_folder import TOKENIZER

if TYPE_CHECKING:
    import tokenizers


def load_tokenizer(folder: str | PathLike[str]) -> tokenizers.Tokenizer:
    """Returns the tokenizer in the file `tokenizer.json` of a folder.

    Raises:
        FileNotFoundError: If there is no such file.
        ModuleNotFoundError: If `tokenizers` is not installed.
        ValueError: If the file is not a tokenizer.
    """
    file = Path(folder) / TOKENIZER
    if not file.exists():
        raise FileNotFoundError(
            f"{file} does not exist: tpudist reads a tokenizer only from this file. Convert "
            "tokenizers in other files with the library that made them."
        )
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "load_tokenizer needs the package tokenizers: pip install 'tpudist[hub]'."
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package has no error class
        raise ValueError(f"{file} is not a tokenizer file: {error}. Download it again.") from error
