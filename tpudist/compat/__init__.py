"""The names of older TensorFlow, for programs that are ported without changes."""

from tpudist.compat import v1

__all__ = ["v1"]
