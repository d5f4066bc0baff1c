"""Main program of the process that compiles for `compiler_process`: `python -m` this module.

A request is a program (StableHLO bytecode), the slice, and the ids of the devices of the program's
partitions. The answer has the compiler's reports. libtpu runs in this process because it ends its
process if one of its own checks fails.
"""

import contextlib
import dataclasses
import tempfile
import time
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir
from jaxlib import xla_client
from jaxlib.mlir import ir

from tpudist.xla import topology
from tpudist.xla.compiler import child, flags
from tpudist.xla.hlo import compiled_program

# An idle compiler uses 0.5 to 2 GB of memory, and starting another one takes only seconds.
_IDLE_S = 120.0
# Attributes with shardings, of Shardy and of its predecessor GSPMD.
_SHARDINGS = ("sdy.sharding", "mhlo.sharding")
# A TPU gets longer lists of arguments as one tuple, as in JAX (`dispatch.should_tuple_args`).
_MAX_ARGUMENTS = 2000


def main() -> None:
    """Answers requests until the parent ends, or sends none for `_IDLE_S`."""
    slices: dict[tuple[str, int], list[jax.Device]] = {}

    def answer(request: dict[str, Any], program: bytes) -> child.Answer:
        key = (request["slice"], request["num_slices"])
        try:
            if key not in slices:
                slices[key] = _devices(*key)
            return _compile(request, program, slices[key])
        except Exception as error:  # the parent raises it
            return {"error": type(error).__name__, "message": str(error)}, b""

    child.serve(answer, idle_s=_IDLE_S)


def _devices(slice_name: str, num_slices: int) -> list[jax.Device]:
    if slice_name == "cpu":
        return jax.devices("cpu")
    return topology.devices(slice_name, num_slices=num_slices)


def _compile(request: dict[str, Any], bytecode: bytes, devices: list[jax.Device]) -> child.Answer:
    with mlir.make_ir_context():
        module = ir.Module.parse(bytecode)
        with contextlib.ExitStack() as stack:
            folder = request["folder"] or stack.enter_context(tempfile.TemporaryDirectory())
            options = _options(request, module, folder)
            by_id = {device.id: device for device in devices}
            used = xla_client.DeviceList(tuple(by_id[i] for i in request["ids"]))
            started = time.monotonic()
            client = devices[0].client
            # jaxlib 0.10 compiles for local devices only with this method; newer ones lack it.
            must_load = hasattr(client, "compile_and_load") and request["slice"] == "cpu"
            compile_for = client.compile_and_load if must_load else client.compile
            try:
                executable = compile_for(module, used, options)
            except jax.errors.JaxRuntimeError as error:
                text, buffers = map(str.encode, compiled_program.read_refused(folder))
                reply = {"error": type(error).__name__, "message": str(error)}
                return reply | {"text_bytes": len(text)}, text + buffers
            seconds = time.monotonic() - started
            program = compiled_program.from_executable(executable, seconds, folder)
    fields = dataclasses.asdict(program)
    text, buffers = fields.pop("text").encode(), fields.pop("buffers").encode()
    return {"program": fields, "text_bytes": len(text)}, text + buffers


def _options(request: dict[str, Any], module: ir.Module, folder: str) -> xla_client.CompileOptions:
    """Returns the options that `jax.jit` would set for the same program."""
    options = xla_client.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = len(request["ids"])
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.array([request["ids"]], np.int32)
    )
    build = options.executable_build_options
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = request["shardy"]
    # MLIR prints names with quotes.
    main: Any = next(f for f in module.body.operations if str(f.name).strip('"') == "main")
    arguments = _attributes(main, "arg_attrs", len(main.type.inputs))
    results = _attributes(main, "res_attrs", len(main.type.results))
    is_tpu = request["slice"] != "cpu"
    options.parameter_is_tupled_arguments = is_tpu and len(arguments) > _MAX_ARGUMENTS
    build.allow_spmd_sharding_propagation_to_parameters = [_is_open(a) for a in arguments]
    build.allow_spmd_sharding_propagation_to_output = [_is_open(r) for r in results]
    overrides = dict(request["options"])
    for name in flags.BUILD_OPTIONS:
        if name in overrides:
            setattr(build, name, overrides.pop(name))
    options.env_option_overrides = [("xla_dump_to", folder), *overrides.items()]
    return options


def _attributes(function: Any, name: str, count: int) -> list[Any]:
    """Returns the attributes of each argument, or of each result, of an MLIR function."""
    if name not in function.attributes:
        return [{}] * count
    return [ir.DictAttr(attributes) for attributes in function.attributes[name]]


def _is_open(attributes: Any) -> bool:
    """Whether the compiler may choose how an argument or a result is split."""
    # "?" marks a dim that is open to propagation. Without a sharding, all dims are open.
    shardings = [str(attributes[name]) for name in _SHARDINGS if name in attributes]
    return not shardings or any("?" in sharding for sharding in shardings)


if __name__ == "__main__":
    main()
