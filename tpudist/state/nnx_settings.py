"""Mutable settings of NNX objects: static attributes that can change in place.

Mostly configurations. A program is traced with their contents, so a change must compile again.
"""

from collections.abc import Hashable, Mapping, Sequence

import jax
import numpy as np

from tpudist.state import nnx_contents, value_keys

_IMMUTABLE = frozenset((str, bytes, bool, int, float, complex, type(None)))


class MutableSettings:
    """The mutable settings among the attributes of some objects.

    Attributes:
        keys: Keys of their contents at the time of construction.

    Args:
        attributes: Attributes of each object.

    Raises:
        TypeError: If a mutable value is opaque, so that its contents cannot be compared.
    """

    def __init__(self, attributes: Sequence[Mapping[str, object]]):
        settings = {id(x): x for own in attributes for x in own.values() if _is_mutable(x)}
        self._values = list(settings.values())
        self.keys = self._current_keys()

    def have_changed(self) -> bool:
        """Whether the contents of one of them differ from `keys`."""
        return bool(self._values) and self._current_keys() != self.keys

    def _current_keys(self) -> tuple[Hashable, ...]:
        return tuple(value_keys.key_of(x) for x in self._values)


def _is_data(value: object) -> bool:
    return isinstance(value, (*nnx_contents.OBJECT_TYPES, jax.Array, np.ndarray))


def _is_mutable(value: object) -> bool:
    if type(value) in _IMMUTABLE or _is_data(value) or isinstance(value, type):
        return False
    try:
        hash(value)
    except TypeError:
        # NNX treats a list or dict with arrays or objects as part of the graph, not as static.
        leaves = jax.tree.leaves(value, is_leaf=_is_data)
        return not any(map(_is_data, leaves))
    # A value that is hashed by its contents must not change. Functions and other callables are
    # compared by identity.
    is_hashed_by_identity = type(value).__hash__ is object.__hash__
    if callable(value) or not is_hashed_by_identity:
        return False
    return value_keys.attributes_of(value) is not None
