"""Finds the processes that take part in a run, and which of them this one is.

There is one resolver, and one file, for each environment.

`__init__.pyi` lists the public names. Each is imported on first use: `tpudist launch` reads the
hosts of Slurm and of a TPU slice here, and needs no JAX, whose import takes half a second.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
