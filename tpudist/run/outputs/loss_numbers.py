"""Warns of losses that a step returns or averages, and that do not match those on one device.

`trace_warnings.choose_fault` looks at state, and this file at the numbers that a person reads. If
shares of a loss are averaged over n replicas, the result is n times too small.
"""

import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from tpudist.lowering import compile
from tpudist.options import LocalMeanWarning
from tpudist.programs.degrees import degree
from tpudist.programs.degrees.degree import Value
from tpudist.run.outputs.results import CallOutputs
from tpudist.run.replica_call import ReplicaCall
from tpudist.run.trace_warnings import TraceWarning

# A share of a loss is as large as a mean over all rows, divided by the number of replicas. See
# `programs.degrees.degree`.
_SHARE = degree.NONE - degree.OF_REPLICAS
_TOLERANCE = 1e-4  # of numbers in a program, which are float32
_HIDE = (
    "To disable this warning: warnings.filterwarnings('ignore', category=tpudist.LocalMeanWarning)."
)


def find_averages(call: ReplicaCall, found: CallOutputs) -> list[tuple[str, int, int]]:
    """Returns the NNX averages to which the function adds: name, output of total, of count."""
    binding = call.binding
    if binding is None or not binding.summed or call.whole:
        return []
    if call.rules:
        return []  # a rule of the user may average a state that is otherwise summed
    first = found.num_results + len(found.variables)
    leaf_and_output = {
        binding.paths[i]: (i, first + n)
        for n, (i, j) in enumerate(found.nnx)
        if binding.is_average(i)
        and i not in call.not_sums
        and (i, j) not in call.inputs.parts_of_objects
    }
    averages = []
    for (*path, name), (leaf, total) in leaf_and_output.items():
        # `nnx.metrics.Average` has a Variable `total` and a Variable `count`.
        count = leaf_and_output.get((*path, "count"))
        if name == "total" and count is not None:
            averages.append((binding.name(leaf), total, count[1]))
    return averages


def find_warnings(
    call: ReplicaCall,
    program: compile.ReplicaProgram,
    values: Sequence[Value],
    num_results: int,
    averages: Sequence[tuple[str, int, int]],
) -> tuple[TraceWarning, ...]:
    """Returns the warnings about one program.

    Args:
        values: Properties of its outputs.
        num_results: Number of results, which are the first outputs.
        averages: Result of `find_averages`.
    """
    found = (
        _describe_results(call, program, values, num_results),
        _describe_averages(call, values, averages),
    )
    return tuple(TraceWarning(LocalMeanWarning, text, where) for text, where in found if text)


def _describe_averages(
    call: ReplicaCall, values: Sequence[Value], averages: Sequence[tuple[str, int, int]]
) -> tuple[str, str]:
    """Returns a warning of an average that differs from one device, and its line; or empty."""
    n = call.strategy.num_replicas_in_sync
    for name, total, count in averages:
        added, counted = values[total].addend, values[count].addend
        if added is None or counted is None:
            continue
        if added.degree is None or counted.degree is None:
            continue
        excess = added.degree.excess - counted.degree.excess
        if not excess or added.is_zero or _may_be_right(added, n):
            continue
        size = "larger" if excess > 0 else "smaller"
        lines = " and ".join(x for x in (added.counted, added.summed) if x)
        text = (
            f"'{call.name}' gives {name} one number for each of {n} replicas, and the metric "
            f"counts it as one example. The number is a share of a loss, or a sum"
            f"{f' ({lines})' if lines else ''}: the average is {float(n) ** abs(float(excess)):g} "
            f"times {size} than on one device. Give the metric the losses of the examples: return "
            f"them from the loss function with has_aux=True, and call metric.update(values=losses)"
            f". {_HIDE}"
        )
        return text, added.counted or added.summed
    return "", ""


def _describe_results(
    call: ReplicaCall, program: compile.ReplicaProgram, values: Sequence[Value], num_results: int
) -> tuple[str, str]:
    """Returns a warning of a reduced loss that differs from one device, and its line; or empty."""
    n = call.strategy.num_replicas_in_sync
    outputs = zip(values, program.closed.out_avals, strict=True)
    for value, aval in itertools.islice(outputs, num_results):
        if not value.is_equal or not _is_loss(aval) or _may_be_right(value, n):
            continue
        if value.degree == _SHARE and value.summed and value.counted:
            text = (
                f"'{call.name}' returns a loss that is {n} times smaller than on one device: it is "
                f"averaged over {n} replicas ({value.summed}), and was divided by the rows of all "
                f"replicas already ({value.counted}). Sum it: jax.lax.psum(loss, 'replica')."
            )
        elif value.degree == degree.OF_REPLICAS and value.averaged:
            text = (
                f"'{call.name}' returns a loss that is {n} times as large as on one device: it is "
                f"a mean over each replica's own rows ({value.averaged}), and is summed over {n} "
                f"replicas ({value.summed}). Return tpudist.compute_average_loss("
                f"per_example_loss), or average it: jax.lax.pmean(loss, 'replica')."
            )
        else:
            continue
        return f"{text} {_HIDE}", value.summed
    return "", ""


def find_shares(
    program: compile.ReplicaProgram,
    values: Sequence[Value],
    num_results: int,
    num_replicas: int,
) -> Mapping[int, str]:
    """Returns the results that are shares of a loss, each with the user's line that divides it."""
    return {
        i: values[i].counted
        for i in range(num_results)
        if not values[i].is_equal
        and values[i].degree == _SHARE
        and not values[i].is_zero
        and _is_loss(program.closed.out_avals[i])
        and not _may_be_right(values[i], num_replicas)
    }


def _is_loss(aval: jax.ShapeDtypeStruct) -> bool:
    return not aval.shape and jnp.issubdtype(aval.dtype, jnp.floating)


def _may_be_right(value: Value, num_replicas: int) -> bool:
    """Whether a number in the program may be the number of replicas, so that the value is right."""
    numbers = [abs(x.number) for x in (*value.factors, *value.before_sum)]
    return any(
        abs(x / y - 1) < _TOLERANCE for x in numbers for y in (num_replicas, 1 / num_replicas)
    )
