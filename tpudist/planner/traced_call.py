"""Traces a step of plain JAX for its estimate: the program, and the placement of its inputs."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from tpudist.planner.plain_placement import PlacedCall
from tpudist.planner.plain_program import Argnums, JittedCall, LoweredCall, read_step
from tpudist.programs import jaxprs
from tpudist.xla.array_attributes import sharding_of
from tpudist.xla.compiler import lowered_program
from tpudist.xla.compiler.only_call import find_only_call


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """A traced step, which is not lowered.

    Attributes:
        closed: Jaxpr of the step.
        shardings: Placement of each of its inputs; None if it is not known.
        donated: Whether its results may use the memory of each input.
        slice_mesh: Mesh of the plan, if the step has a mesh of devices of this machine.
    """

    closed: jaxprs.ClosedJaxpr
    shardings: Sequence[Sharding | None]
    donated: Sequence[bool]
    slice_mesh: Mesh | None = None

    @property
    def mesh(self) -> Mesh | None:
        """Mesh of the plan, as of the lowered program; None if the step names no devices."""
        if self.slice_mesh is not None:
            return self.slice_mesh
        return next((x for x in self._find_meshes() if isinstance(x, Mesh) and not x.empty), None)

    def _find_meshes(self) -> Iterator[Mesh | AbstractMesh]:
        yield from (x.mesh for x in self.shardings if isinstance(x, NamedSharding))
        for eqn in jaxprs.walk(self.closed):
            if eqn.primitive.name == "shard_map":
                yield eqn.params["mesh"]
            shardings = eqn.params.get("sharding"), *eqn.params.get("in_shardings", ())
            yield from (x.mesh for x in shardings if isinstance(x, NamedSharding))


def trace_call(step: Callable[..., Any], call: PlacedCall, argnums: Argnums) -> TracedCall:
    """Traces a step for the arguments of a call; raises what `lower_call` raises.

    The program and the placement of its inputs come from one trace, of a function of all arrays
    that calls the step. So it does not matter in which order a wrapper passes them on.
    """
    return read_step(_trace_jitted, step, call, argnums)


def trace_lowered(call: LoweredCall) -> TracedCall:
    """Returns the trace of a program that was lowered."""
    if call.closed is None:
        raise ValueError(
            "A lowered program does not have its operations. For an estimate, return the function "
            "and its arguments, or what its `trace` returns."
        )
    number = len(call.closed.jaxpr.invars)
    inputs = {x.number: x for x in lowered_program.inputs_of(call.lowered)}
    found = [inputs.get(i) for i in range(number)]
    return TracedCall(
        call.closed,
        [x and x.sharding for x in found],
        [x is not None and x.donated for x in found],
        call.slice_mesh,
    )


def _trace_jitted(step: JittedCall) -> TracedCall:
    outer, arrays = step.trace_arrays()
    found = find_only_call(outer.jaxpr)
    if found is None:
        raise ValueError(
            f"{step.name} does more than call one function of jax.jit, so its program is not known."
        )
    numbers = found.numbers
    if step.may_be_wrapper and (inner := find_only_call(found.program)):
        numbers = [None if i is None else numbers[i] for i in inner.numbers]
        found = inner
    own = [None if i is None else sharding_of(arrays[i]) for i in numbers]
    placed = [a or b for a, b in zip(found.shardings, own, strict=True)]
    return TracedCall(found.program, placed, found.donated)
