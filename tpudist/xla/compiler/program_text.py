"""Prints lowered programs without source locations, so that equal programs have equal texts.

JAX prints no source locations. But a Pallas kernel for TPUs is bytecode in the program, with the
paths and lines of JAX's and the user's source files. Since jax 0.12 they may also be in a field of
their own.
"""

import base64
import re

import jax
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu

# StableHLO prints the configuration of a kernel as JSON with escaped quotes.
_BYTECODE = re.compile(r"(?<=\\22body\\22: \\22)[A-Za-z0-9+/=]+")
_LOCATIONS = re.compile(r"(?<=\\22debug_locations\\22: \\22)[A-Za-z0-9+/=]+")


def strip_locations(lowered: jax.stages.Lowered) -> str:
    """Returns the text of a program, with its kernels as text and without source locations.

    Two programs with the same text compute the same, whatever their source files.
    """
    text = _LOCATIONS.sub("", lowered.as_text())
    return _BYTECODE.sub(lambda body: _print_kernel(body[0]), text)


def _print_kernel(body: str) -> str:
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        tpu.register_dialect(context)
        try:
            module = ir.Module.parse(base64.b64decode(body))
        # A kernel in another format keeps its bytecode, and with it its locations.
        except (ir.MLIRError, ValueError):
            return body
        return str(module.operation.get_asm(enable_debug_info=False))
