"""The names of older TensorFlow, for programs that are ported without changes."""

# `import tpudist` does not import this package, which imports all strategies; `tpudist.__getattr__`
# does so at the first use.
from tpudist.compat import v1

__all__ = ["v1"]
