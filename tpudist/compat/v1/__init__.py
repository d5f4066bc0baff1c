"""The names of `tf.compat.v1.distribute`, in this module and in `distribute`, as in TensorFlow."""

from tpudist.compat.v1 import distribute
from tpudist.compat.v1.distribute import *  # noqa: F403
from tpudist.compat.v1.distribute import __all__ as _names

# The checker cannot evaluate the `__all__` of another module. The list exists once, in
# `distribute`, because `tf.compat.v1` has the same names in both places.
__all__ = ["distribute", *_names]  # pyright: ignore[reportUnsupportedDunderAll]
