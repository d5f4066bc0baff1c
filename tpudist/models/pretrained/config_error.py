"""Errors that say why a pretrained model is none that the transformer can be."""

from __future__ import annotations

from typing import Any


def refuse(key: str, value: Any, why: str) -> ValueError:
    """The error for a key of a `config.json`.

    Args:
        key: The key.
        value: What it says.
        why: What that means, as "has experts".
    """
    return ValueError(
        f"config.json says {key}: {value!r}: the model {why}. The reference transformer "
        "(tpudist.models.Transformer) would compute a different result, so nothing is loaded. Use "
        "the library that the model comes from."
    )
