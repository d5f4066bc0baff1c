"""Optional: an element of an iterator, or no element at its end."""

from tpudist.array_types import PyTree

_NOTHING = object()


class Optional:
    """The result of `DistributedIterator.get_next_as_optional`: an element, or none at the end.

    Matches `tf.experimental.Optional`, whose `has_value` is a tensor.
    """

    def __init__(self, value: PyTree = _NOTHING):
        self._value = value

    def has_value(self) -> bool:
        """Whether there is an element."""
        return self._value is not _NOTHING

    def get_value(self) -> PyTree:
        """Returns the element; raises `ValueError` if there is none."""
        if self._value is _NOTHING:
            raise ValueError(
                "get_value() was called on an Optional without a value: the iterator was at its "
                "end. Call has_value() first."
            )
        return self._value

    def __repr__(self) -> str:
        return f"Optional({self._value!r})" if self.has_value() else "Optional()"
