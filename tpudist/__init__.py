"""The programming model of `tf.distribute` on JAX: write the step for one replica.

`__init__.pyi` lists the public names. Each is imported from its module on first use, so that
`import tpudist` takes little longer than `import jax`, and a program loads only what it uses.
"""

import importlib
import importlib.util
import sys
from typing import Any

import lazy_loader

from tpudist import context, library_objects

__version__ = "0.1.0"

_get_public_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _get_public_name(name)
    # Other packages, such as `tpudist.training`, work without an import of their own, too.
    if not name.startswith("_") and importlib.util.find_spec(f"tpudist.{name}"):
        return importlib.import_module(f"tpudist.{name}")
    problem = f"module 'tpudist' has no attribute {name!r}"
    raise AttributeError(problem, name=name, obj=sys.modules[__name__])


# Packages of lower layers need two things that packages of higher layers define. They are connected
# here, because this is the only module that may import both.


def _make_default_mode() -> context.Mode:
    from tpudist.strategy import default_strategy

    return default_strategy.make_default_mode()


context.set_default_mode_factory(_make_default_mode)


def _get_keras_opener() -> library_objects.Opener:
    from tpudist.keras import model_state

    return model_state.open_object


library_objects.register("keras", _get_keras_opener)
