"""The program of a candidate's step of plain JAX, for its estimate without the compiler."""

import collections
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding

from tpudist.planner import plain_step
from tpudist.planner.roofline import hints, operation_blocks
from tpudist.planner.roofline.operation_blocks import StepProgram
from tpudist.planner.roofline.sharded_value import Axes
from tpudist.planner.traced_call import TracedCall


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
    call = plain_step.trace_step(step, args, **{k: given[k] for k in names if k in given})
    mesh = call.mesh or Mesh(np.array(candidate.devices[:1]), ("devices",))
    return _read(call, mesh), mesh


def _read(call: TracedCall, mesh: Mesh) -> StepProgram:
    jaxpr, block = call.closed.jaxpr, operation_blocks.read(call.closed)
    arrays = [x.aval for x in jaxpr.invars]
    axes = [_axes_of(x, len(a.shape)) for x, a in zip(call.shardings, arrays, strict=True)]
    donated = collections.defaultdict[Any, list[int]](list)
    for i, (array, number) in enumerate(zip(arrays, block.inputs, strict=True)):
        if call.donated[i] and block.num_uses[number]:  # JAX drops unused inputs
            donated[array.shape, array.dtype].append(i)
    replaced = []
    for x in jaxpr.outvars:  # JAX gives a donated input to the first result of its shape, too
        places = donated[x.aval.shape, x.aval.dtype]
        replaced.append(places.pop(0) if places else None)
    sizes = {str(name): size for name, size in mesh.shape.items()}
    return StepProgram(block, tuple(axes), tuple(replaced), sizes)


def _axes_of(sharding: Sharding | None, rank: int) -> Axes:
    return hints.axes_of_spec(getattr(sharding, "spec", ()), rank)  # only a NamedSharding has one


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)
