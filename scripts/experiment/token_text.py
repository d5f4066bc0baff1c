"""Your text as tokens: files or folders, split into training and held-out text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HELD_OUT_SHARE = 0.05
"""At least so much of the tokens is held out."""


@dataclass(frozen=True)
class TokenText:
    """Tokens to train on and tokens to judge by, from different documents."""

    train: np.ndarray
    """`[tokens]` int32: the documents, one after the other."""
    held_out: np.ndarray
    """`[tokens]` int32: those held out, or the end of the only one."""
    source: str
    """Description of the source of the text."""


def read_documents(paths: Sequence[Path]) -> dict[str, str]:
    """The text of files, and of all files in folders, by name.

    In a folder, hidden files and files that are not UTF-8 text are skipped.

    Raises:
        ValueError: If a path does not exist, a named file is not text, or no text remains.
    """
    found: dict[str, str] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(
                f"--text {path} does not exist. Use a text file, or a folder of text files."
            )
        if path.is_file():
            text = _read(path)
            if text is None:
                raise ValueError(f"--text {path} is not UTF-8 text. Convert it, or omit it.")
            found[str(path)] = text
            continue
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not hidden and (text := _read(file)) is not None:
                found[str(file)] = text
    if not any(text.strip() for text in found.values()):
        raise ValueError(
            f"--text {' '.join(map(str, paths))} contains no UTF-8 text. Use text files, or "
            f"folders of text files."
        )
    return found


def python_topics() -> dict[str, str]:
    """Texts of Python's `help()` on the language, by topic: English that every machine has."""
    from pydoc_data.topics import topics

    return dict(topics)


def tokenize(
    documents: dict[str, str], tokenizer: Any, *, vocabulary: int, end: int | None, source: str
) -> TokenText:
    """Documents as tokens; some are held out, by their names, or of few ones the end of each.

    Args:
        documents: Texts by name.
        tokenizer: A `tokenizers.Tokenizer`; tokens that it adds to a document stay.
        vocabulary: Number of tokens that the model knows.
        end: The token that ends a document, if the model has one.
        source: Description of their source.

    Raises:
        ValueError: The tokenizer has tokens that the model does not know.
    """
    names = [name for name, text in documents.items() if text.strip()]
    tokens: dict[str, np.ndarray] = {}
    for name, encoded in zip(
        names, tokenizer.encode_batch([documents[name] for name in names]), strict=True
    ):
        ids = list(encoded.ids)
        if end is not None and ids[-1:] != [end]:
            ids.append(end)
        tokens[name] = np.asarray(ids, np.int32)
    highest = max(int(ids.max()) for ids in tokens.values() if len(ids))
    if highest >= vocabulary:
        raise ValueError(
            f"The tokenizer returns token {highest}, but the model has {vocabulary} tokens. The "
            f"tokenizer.json in its folder belongs to another model: download both again."
        )
    held_out = choose_held_out({name: len(ids) for name, ids in tokens.items()})
    if held_out:
        judged = [ids for name, ids in tokens.items() if name in held_out]
        train = [ids for name, ids in tokens.items() if name not in held_out]
    else:
        cuts = {name: max(1, round(len(x) * (1 - HELD_OUT_SHARE))) for name, x in tokens.items()}
        judged = [ids[cuts[name] :] for name, ids in tokens.items()]
        train = [ids[: cuts[name]] for name, ids in tokens.items()]
    return TokenText(np.concatenate(train), np.concatenate(judged), source)


def choose_held_out(lengths: Mapping[str, int]) -> set[str]:
    """Selects the documents to hold out: by hashes of their names, until they suffice.

    None where no whole documents are about as many tokens as are wanted, as of few documents.
    """
    wanted = HELD_OUT_SHARE * sum(lengths.values())
    chosen: set[str] = set()
    found = 0
    for name in sorted(lengths, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if found >= wanted:
            break
        if found + lengths[name] <= 2 * wanted:
            chosen.add(name)
            found += lengths[name]
    return chosen if 2 * found >= wanted else set()


def _read(file: Path) -> str | None:
    """Returns the text of a file; None if it is not text."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text
