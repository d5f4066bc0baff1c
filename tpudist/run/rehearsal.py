"""The result of a rehearsal, a call of a step that changes no state: the values it would write.

`verification` compares such results between devices.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from tpudist.array_types import PyTree
from tpudist.lowering import compile
from tpudist.programs.jaxprs import ClosedJaxpr
from tpudist.run.dispatch.step_plan import StepPlan
from tpudist.run.outputs.results import CallOutputs, LeafKind, TracedStep
from tpudist.state.nnx_binding import Binding
from tpudist.state.variable import Variable


@dataclasses.dataclass(frozen=True)
class StandIn:
    """The difference between a strategy and its twin while a step is verified.

    Attributes:
        value_of: Returns the array of a Variable or of a captured value on the devices of the twin.
        rewrite: Called with the jaxpr of one replica; returns a function of the same inputs
            that runs in its place.
    """

    value_of: Callable[[Any], jax.Array]
    rewrite: Callable[[ClosedJaxpr], Callable[..., list[jax.Array]]] | None = None


@dataclasses.dataclass(frozen=True)
class Change:
    """One array of the state that a step writes.

    Attributes:
        name: The Variable, or kind and path of the NNX Variable.
        before: The array that the step read. `[num_replicas, ...]` for an ON_READ Variable.
        after: The array that the step would write, with the same shape.
        output: The number of the output of the program.
        is_average: Whether it is the total or the count of an NNX average.
    """

    name: str
    before: jax.Array
    after: jax.Array
    output: int
    variable: Variable | None = None
    is_average: bool = False


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """The values that one call of a step computes.

    Attributes:
        changes: The state that the call would write.
        replaced: Argument arrays that the result replaces, by the number of the leaf of the result.
    """

    changes: tuple[Change, ...]
    result: PyTree
    replaced: Mapping[int, jax.Array]
    traced: TracedStep


def find_changes(
    plan: StepPlan,
    binding: Binding | None,
    found: CallOutputs,
    inputs: Sequence[jax.Array],
    written: Sequence[jax.Array],
) -> tuple[Change, ...]:
    """Returns the state that a program has written, with the names of its parts.

    `inputs` are its flat inputs, and `written` its new state in the order of `plan.state`.
    """
    names = list(_names(plan, binding))
    counts = collections.Counter(names)
    numbers: collections.Counter = collections.Counter()
    outputs = {key: found.num_results + i for i, key in enumerate([*found.variables, *found.nnx])}
    changes = []
    for name, slot, after in zip(names, plan.state, written, strict=True):
        if counts[name] > 1:
            numbers[name] += 1
            name = f"{name} ({numbers[name]})"
        key = slot.key
        if key in outputs:  # if not, only traces for other shapes write it
            variable = key if slot.is_variable else None
            is_average = variable is None and binding is not None and binding.is_average(key[0])
            before = inputs[slot.position]
            changes.append(Change(name, before, after, outputs[key], variable, is_average))
    return tuple(changes)


def _names(plan: StepPlan, binding: Binding | None) -> Iterator[str]:
    for slot in plan.state:
        if slot.is_variable:
            yield f"Variable '{slot.key.name}'"
            continue
        assert binding is not None, "the leaves belong to its objects"
        leaf, array = slot.key
        value = binding.values()[leaf]
        path = jax.tree_util.tree_flatten_with_path(value)[0][array][0]
        yield binding.name(leaf) + jax.tree_util.keystr(path)


def find_replaced(
    traced: TracedStep, num_captured: int, inputs: Sequence[jax.Array]
) -> dict[int, jax.Array]:
    """Returns the arguments that a result replaces, by the number of the leaf of the result."""
    return {
        i: inputs[num_captured + traced.returned[output]]
        for i, (kind, output) in enumerate(traced.found.result)
        if kind is LeafKind.ARRAY and output in traced.returned
    }


def rewrite(
    traced: TracedStep,
    rewrite_program: Callable[[ClosedJaxpr], Callable[..., list[jax.Array]]],
    name: str,
) -> TracedStep:
    """Returns the trace with the program that `StandIn.rewrite` returns for its program."""
    closed, stacked = traced.program.closed, traced.program.stacked
    n = traced.mesh.num_replicas
    shapes = [
        jax.ShapeDtypeStruct((n, *x.shape) if is_part else x.shape, x.dtype, weak_type=x.weak_type)
        for x, is_part in zip(closed.in_avals, stacked, strict=True)
    ]
    program = compile.trace(rewrite_program(closed), traced.mesh, shapes, stacked, name)
    return dataclasses.replace(traced, program=program)
