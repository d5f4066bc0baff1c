"""The program of a candidate's step of plain JAX, for its estimate without the compiler."""

import collections
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec, Sharding

from tpudist.planner import plain_step
from tpudist.planner.plain_program import LoweredCall
from tpudist.planner.roofline import hints, operation_blocks
from tpudist.planner.roofline.operation_blocks import StepProgram
from tpudist.planner.roofline.sharded_value import Axes
from tpudist.xla.compiler import lowered_program


def plan_options(candidate: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `planner.plan` for a candidate, whose mesh is the default for specs.

    Args:
        candidate: Candidate of a search.
        options: Options that the user's function has returned with its step.

    Raises:
        ValueError: If they name a slice.
    """
    if "topology" in options:
        raise ValueError(
            f"The function of a search returned topology={options['topology']!r}. Omit it there: "
            "the candidate decides the slice."
        )
    specs = jax.tree.leaves(options.get("in_shardings"), is_leaf=_is_spec)
    mesh = {"mesh": candidate.mesh_axes} if any(map(_is_spec, specs)) else {}
    return {"topology": candidate.topology, **mesh, **options}


def trace(
    candidate: Any, step: Any, args: tuple, options: Mapping[str, Any]
) -> tuple[StepProgram, Mesh]:
    """Returns the program of a step and its mesh.

    Raises:
        ValueError: If the inputs of the program are not known. Also what the step raises.
    """
    names = ("kwargs", "topology", "mesh", "in_shardings", "donate_argnums", "static_argnums")
    given = plan_options(candidate, options)
    call = plain_step.lower_step(step, args, **{k: given[k] for k in names if k in given})
    return _read(call), call.mesh


def _read(call: LoweredCall) -> StepProgram:
    if call.closed is None:
        raise ValueError(f"The operations of {call.name} are not known.")
    jaxpr = call.closed.jaxpr
    arrays = [x.aval for x in jaxpr.invars]
    axes = [hints.axes_of_spec((), len(x.shape)) for x in arrays]
    donated = collections.defaultdict[Any, list[int]](list)
    for x in lowered_program.inputs_of(call.lowered):
        if x.number >= len(arrays) or arrays[x.number].shape != x.shape:
            raise ValueError(f"The program of {call.name} has other inputs than its trace.")
        axes[x.number] = _axes_of(x.sharding, len(x.shape))
        if x.donated:
            donated[x.shape, x.dtype].append(x.number)
    replaced = []
    for x in jaxpr.outvars:  # JAX gives a donated input to the first result of its shape, too
        places = donated[x.aval.shape, x.aval.dtype]
        replaced.append(places.pop(0) if places else None)
    sizes = {str(name): size for name, size in call.mesh.shape.items()}
    return StepProgram(operation_blocks.read(call.closed), tuple(axes), tuple(replaced), sizes)


def _axes_of(sharding: Sharding | None, rank: int) -> Axes:
    return hints.axes_of_spec(getattr(sharding, "spec", ()), rank)  # only a NamedSharding has one


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)
