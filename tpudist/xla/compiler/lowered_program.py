"""Reads facts about a lowered program that JAX has, but does not make public."""

import copy
import io
import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxlib.mlir import ir

# Such as `sdy.mesh @mesh = <["data"=4, "model"=2]>`. A mesh that has the devices of the program in
# another order has their numbers, too.
_MESH = re.compile(r"sdy\.mesh @\w+ = <\[([^\]]+)\]>")
_AXIS = re.compile(r'"((?:[^"\\]|\\.)*)"=(\d+)')


@dataclass(frozen=True)
class ProgramInput:
    """An array that a lowered program receives.

    Attributes:
        number: Number among all inputs of the function, including unused ones.
        name: Name and place in the function that was lowered, such as `params['kernel']`.
        shape: Global shape.
        dtype: Dtype, which may be a type of random keys.
        sharding: Placement; None if the compiler chooses it.
        donated: Whether an output may reuse its memory.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None
    donated: bool


def compiler_options_of(lowered: jax.stages.Lowered) -> dict[str, Any]:
    """Returns the `compiler_options` that `jax.jit` got for a program."""
    try:
        return dict(_read_lowering(lowered)._compiler_options_kvs)
    except AttributeError as error:
        raise _unknown_version("would compile it differently than jax.jit does") from error


def devices_of(lowered: jax.stages.Lowered) -> list[jax.Device]:
    """Returns the devices that a program was lowered for, in the order of its mesh."""
    try:
        return list(_read_lowering(lowered)._device_list)
    except AttributeError as error:
        raise _unknown_version("does not know its devices") from error


def mesh_of(lowered: jax.stages.Lowered) -> Mesh:
    """Returns the mesh of a program; one axis "devices" if it names no mesh of all its devices."""
    devices = np.array(devices_of(lowered))
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    for operation in module.body.operations:
        if match := _MESH.match(str(operation) if operation.name == "sdy.mesh" else ""):
            axes = {name: int(size) for name, size in _AXIS.findall(match[1])}
            if math.prod(axes.values()) == devices.size:
                return Mesh(devices.reshape(*axes.values()), tuple(axes))
    return Mesh(devices, ("devices",))


def inputs_of(lowered: jax.stages.Lowered) -> list[ProgramInput]:
    """Returns the inputs of a program in its order, without unused ones."""
    try:
        lowering = _read_lowering(lowered)
        facts = lowering.compile_args
        arrays, shardings = facts["global_in_avals"], facts["in_shardings"]
        everything, used = facts["all_args_info"], sorted(facts["kept_var_idx"])
        donated = lowering._donated_invars
        names = everything.debug_info.safe_arg_names(len(everything.in_avals))
    except (AttributeError, KeyError) as error:
        raise _unknown_version("does not know its inputs") from error
    return [
        ProgramInput(i, names[i], x.shape, x.dtype, _read_sharding(sharding), is_donated)
        for i, x, sharding, is_donated in zip(used, arrays, shardings, donated, strict=True)
    ]


def result_shardings_of(lowered: jax.stages.Lowered) -> list[Sharding | None]:
    """Returns the sharding of each result; None if the compiler chooses it."""
    try:
        shardings = _read_lowering(lowered).compile_args["out_shardings"]
    except (AttributeError, KeyError) as error:
        raise _unknown_version("does not know its results") from error
    return [_read_sharding(sharding) for sharding in shardings]


def copy_module(lowered: jax.stages.Lowered) -> ir.Module:
    """Returns a copy of the MLIR module of a program, which may be changed."""
    module: Any = lowered.compiler_ir("stablehlo")
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    return ir.Module.parse(bytecode.getvalue(), module.context)


def with_module(lowered: jax.stages.Lowered, module: ir.Module) -> jax.stages.Lowered:
    """Returns a program with another module of the same inputs and results."""
    other = copy.copy(lowered)
    lowering = other._lowering = copy.copy(_read_lowering(lowered))
    lowering._hlo = module
    if other.compiler_ir("stablehlo") is not module:
        raise _unknown_version("cannot change it")
    return other


def _read_sharding(sharding: Any) -> Sharding | None:
    return sharding if isinstance(sharding, Sharding) else None


def _read_lowering(lowered: jax.stages.Lowered) -> Any:
    return lowered._lowering


def _unknown_version(consequence: str) -> RuntimeError:
    return RuntimeError(
        f"tpudist cannot read a program that jax {jax.__version__} has lowered, and "
        f"{consequence}. Install a jax that tpudist supports: see CONTRIBUTING.md."
    )
