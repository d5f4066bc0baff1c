"""The error for a pretrained model that the reference transformer cannot compute."""

from __future__ import annotations


def config_error(key: str, value: object, reason: str) -> ValueError:
    """Returns the error for a key of a `config.json`.

    Args:
        key: Key.
        value: Value of the key.
        reason: Meaning of the value, as a predicate such as "has experts".
    """
    return ValueError(
        f"config.json says {key}: {value!r}: the model {reason}. The reference transformer "
        "(tpudist.models.Transformer) would compute a different result, so nothing is loaded. Use "
        "the library that the model comes from."
    )
