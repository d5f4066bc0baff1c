"""The text of a lowered program that is the same wherever its source lies.

JAX leaves source locations out of what it prints, but a Pallas kernel for TPUs is in the program as
bytecode that holds its own: the paths and lines of JAX's kernels, and of the user's. Since jax 0.12
they may also stand beside it.
"""

import base64
import re

import jax
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu

# As StableHLO prints the configuration of a kernel, which is JSON with its quotes escaped.
_BYTECODE = re.compile(r"(?<=\\22body\\22: \\22)[A-Za-z0-9+/=]+")
_LOCATIONS = re.compile(r"(?<=\\22debug_locations\\22: \\22)[A-Za-z0-9+/=]+")


def strip_locations(lowered: jax.stages.Lowered) -> str:
    """The text of a program, its kernels in words and without source locations.

    Two programs with the same text compute the same, from whichever file and line they came.
    """
    text = _LOCATIONS.sub("", lowered.as_text())
    return _BYTECODE.sub(lambda body: _kernel(body[0]), text)


def _kernel(body: str) -> str:
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        tpu.register_dialect(context)
        try:
            module = ir.Module.parse(base64.b64decode(body))
        except (ir.MLIRError, ValueError):  # no kernel of this JAX's: as it is
            return body
        return str(module.operation.get_asm(enable_debug_info=False))
