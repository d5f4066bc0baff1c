"""Warns of traced functions that most likely compute other numbers than the user intends.

It reports only facts that the program proves; see the classes of the warnings.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpudist.lowering import compile
from tpudist.options import LocalMeanWarning, UndistributedBatchWarning
from tpudist.programs import replica_agreement, replica_equality
from tpudist.programs.degrees import degree_walk
from tpudist.programs.degrees.degree_faults import Fault
from tpudist.programs.jaxprs import ClosedJaxpr
from tpudist.programs.rows import trace_comparison
from tpudist.run.frame.captures import Capture
from tpudist.run.replica_call import ReplicaCall
from tpudist.xla import descriptions, user_code
from tpudist.xla.mesh import ReplicaMesh
from tpudist.xla.traces import is_traced

_MAX_NAMED = 3  # arguments in a warning
_DIVIDE = (
    "Divide the loss by the rows of all replicas, tpudist.compute_average_loss(per_example_loss), "
    "and sum the gradients, all_reduce('sum', grads)"
)
# Python records here which warnings it has shown, as in `__warningregistry__` of a module.
_shown: dict[Any, Any] = {}


@dataclasses.dataclass(frozen=True)
class TraceWarning:
    """A warning about the user's line `where`, `file:line`; if empty, about the call."""

    category: type[Warning]
    message: str
    where: str = ""


def warn_once(trace_warnings: Sequence[TraceWarning], shown: set[type[Warning]]) -> None:
    """Shows the warnings whose category is not in `shown`, and adds their categories to it."""
    for warning in trace_warnings:
        if warning.category not in shown:
            where = warning.where or user_code.line_of_call() or "unknown:0"
            file, _, line = where.rpartition(":")
            warnings.warn_explicit(
                warning.message, warning.category, file, int(line), registry=_shown
            )
            shown.add(warning.category)


def find_warnings(
    call: ReplicaCall,
    variables: Sequence[Any],
    program: compile.ReplicaProgram,
    proof: replica_agreement.Agreement,
    labels: Callable[[], list[str]],
    fault: Fault | None,
) -> tuple[TraceWarning, ...]:
    """Returns the warnings about the state of a function that was traced.

    Args:
        variables: The Variables and captured PerReplicas that are the first inputs.
        fault: New state that does not match one device; see `choose_fault`.
    """
    if not proof.sums or call.strategy.num_replicas_in_sync == 1:
        return ()
    captured = any(isinstance(x, Capture) for x in variables)
    if not call.kinds.per_replica and not captured:
        warning = _find_undistributed(call, len(variables), program, proof, labels)
    elif fault is not None:
        _, numbers = _row_dims(call, variables)
        n = call.strategy.num_replicas_in_sync
        where = fault.counted or fault.summed
        text = _describe_fault(fault, call.name, n, numbers)
        warning = TraceWarning(LocalMeanWarning, text, where)
    else:
        warning = None
    return () if warning is None else (warning,)


def find_degrees(
    call: ReplicaCall,
    variables: Sequence[Any],
    program: compile.ReplicaProgram,
    state: Mapping[int, int],
    trace_larger: Callable[[Mapping[int, int]], ClosedJaxpr | None],
) -> degree_walk.Findings | None:
    """Returns how values grow with rows and replicas; None if that cannot be found.

    Args:
        program: The program of one replica, without masks for partial batches.
        state: The outputs that are new state, each with the input that it replaces.
        trace_larger: Called with the dims of the inputs that have rows; returns the program at more
            rows on more replicas, or None if it cannot be traced.
    """
    batches, _ = _row_dims(call, variables)
    # The walk compares both programs equation by equation, so they must have the same equations.
    larger = trace_larger(batches) if batches else None
    if larger is None or trace_comparison.find_difference(program.closed, larger) is not None:
        return None
    return degree_walk.walk(program.closed, larger, [not x for x in program.stacked], state)


def choose_fault(
    call: ReplicaCall,
    variables: Sequence[Any],
    program: compile.ReplicaProgram,
    faults: Sequence[Fault],
) -> Fault | None:
    """Returns the fault to warn of: state that does not match one device with all rows."""
    faults = [x for x in faults if not x.is_draw]
    if not faults:
        return None
    n, (batches, numbers) = call.strategy.num_replicas_in_sync, _row_dims(call, variables)
    rows = max(program.closed.in_avals[i].shape[dim] for i, dim in batches.items())
    wrong = [x for x in faults if x.excess and not x.may_be_right(n, rows)]
    uneven = [x for x in faults if not x.excess] if len(numbers) > 1 else []
    return next(iter(wrong + uneven), None)


def _describe_fault(fault: Fault, name: str, n: int, numbers: set[int]) -> str:
    """Returns the warning about a fault on `n` replicas with these numbers of rows."""
    # `excess` is the power of the number of replicas by which the value is too large; if negative,
    # too small. `counted` and `summed` are the lines that divide by rows and sum over replicas.
    counted = f" ({fault.counted})" if fault.counted else ""
    summed = f" ({fault.summed})" if fault.summed else ""
    factor = float(n) ** abs(float(fault.excess))
    if fault.mixed:
        problem = (
            f"adds a value that is equal on all replicas to a value of each replica's own rows"
            f"{counted}, and sums both over {n} replicas{summed}: the first value counts {n} times"
        )
        remedy = "Divide it by the number of replicas: tpudist.scale_regularization_loss(value)"
    elif not fault.excess:
        problem = (
            f"averages over {n} replicas{summed} a mean over each replica's own rows{counted}, and "
            f"replicas have from {min(numbers)} to {max(numbers)} rows in this batch: a row counts "
            f"more on a replica with fewer rows"
            f"{'' if min(numbers) else ', and the mean over no rows is NaN'}"
        )
        remedy = _DIVIDE
    elif fault.excess > 0:
        problem = (
            f"updates its state with a value that is {factor:g} times as large as on one device "
            f"with all rows: it is a mean over each replica's own rows, or equal on all "
            f"replicas{counted}, and is summed over {n} replicas{summed}, or multiplied by their "
            f"number"
        )
        remedy = (
            f"{_DIVIDE}. Or, if all replicas have the same number of rows, average the gradients: "
            "tpudist.Optimizer(..., reduce_op='mean'), all_reduce('mean', grads)"
        )
    else:
        problem = (
            f"updates its state with a value that is {factor:g} times smaller than on one device "
            f"with all rows: it is averaged over {n} replicas{summed}, although it is a sum over "
            f"rows, or already divided by the rows of all replicas{counted}"
        )
        remedy = "Sum it over the replicas: reduce_op='sum', all_reduce('sum', grads)"
    return (
        f"'{name}' {problem}. {remedy}. To disable this warning: "
        f"warnings.filterwarnings('ignore', category=tpudist.LocalMeanWarning)."
    )


def _row_dims(call: ReplicaCall, variables: Sequence[Any]) -> tuple[dict[int, int], set[int]]:
    """Returns the inputs that are batches, with their dim of rows.

    Also the numbers of rows of replicas, if some batch is partial.
    """
    first = len(variables) + call.inputs.num_nnx
    values = [(i, x.value) for i, x in enumerate(variables) if isinstance(x, Capture)]
    per_replica = set(call.kinds.per_replica)
    leaves = enumerate(call.inputs.leaves_of_arguments, first)
    values += [(i, call.leaves[leaf]) for i, leaf in leaves if leaf in per_replica]
    batches = [(i, x, x.rows) for i, x in values if x.rows is not None]
    batches = [(i, x, rows) for i, x, rows in batches if x.shape and not x.other_rows]
    has_partial = call.inputs.groups is not None
    numbers = {y for _, _, rows in batches for y in rows} if has_partial else set()
    return {i: x.dim for i, x, _ in batches}, numbers


def _find_undistributed(
    call: ReplicaCall,
    num_variables: int,
    program: compile.ReplicaProgram,
    proof: replica_agreement.Agreement,
    labels: Callable[[], list[str]],
) -> TraceWarning | None:
    """Warns if all replicas compute with the same arrays of the host, and add up equal results."""
    if not any(None in x.causes for x in proof.sums):
        return None
    # An array with the shape of a sum or of an output is likely a parameter, not a batch.
    state = {shape for x in proof.sums for shape in x.shapes}
    state |= {x.aval.shape for x in program.closed.jaxpr.outvars}
    arrays = [
        (i, leaf)
        for i, leaf in _host_arrays(call, num_variables + call.inputs.num_nnx)
        if call.leaves[leaf].shape not in state
    ]
    where = _find_equal_sum(program, proof, [i for i, _ in arrays])
    if where is None:
        return None
    summed = [leaf for i, leaf in arrays if _find_equal_sum(program, proof, [i]) is not None]
    arrays_on_devices = [call.leaves[i] for i in summed if isinstance(call.leaves[i], jax.Array)]
    is_split = any(len(x.sharding.device_set) > 1 for x in arrays_on_devices)
    n = call.strategy.num_replicas_in_sync
    message = (
        f"'{call.name}' received {_name_arguments(call, summed, labels())}, which "
        f"{'are' if len(summed) > 1 else 'is'} not distributed; no other argument is either. Each "
        f"of {n} replicas computes with all rows, and the results are added "
        f"up{f' (at {where})' if where else ''}: the work and the sum are {n} times those of one "
        "device, unless the sum is divided. Distribute batches: "
        f"strategy.experimental_distribute_dataset(dataset)"
        f"{' (a sharding gives replicas no rows of their own)' if is_split else ''}. "
        "To disable this warning: warnings.filterwarnings('ignore', "
        "category=tpudist.UndistributedBatchWarning)."
    )
    return TraceWarning(UndistributedBatchWarning, message)


def _find_equal_sum(
    program: compile.ReplicaProgram, proof: replica_agreement.Agreement, inputs: Sequence[int]
) -> str | None:
    """Returns the line of a sum of equal values that depend on one of these inputs, or None."""
    # The proof finds dependence, too: if only these inputs differ between replicas, the values that
    # differ are the values that depend on them.
    causes: list[str | None] = [None] * len(program.closed.jaxpr.invars)
    for i in inputs:
        causes[i] = "this argument"
    marked = replica_equality.prove(program.closed, causes).sums
    for actual, other in zip(proof.sums, marked, strict=True):
        pairs = zip(actual.causes, other.causes, strict=True)
        if any(x is None and y == "this argument" for x, y in pairs):
            return actual.where
    return None


def _host_arrays(call: ReplicaCall, first: int) -> Iterator[tuple[int, int]]:
    """Yields the inputs that the user has not distributed, with the argument that each one is."""
    # NumPy's arrays, arrays on one device, and arrays that are split by rows over several devices.
    arrays, mesh = set(call.kinds.arrays), call.strategy.replica_mesh
    for i, leaf in enumerate(call.inputs.leaves_of_arguments, first):
        x = call.leaves[leaf]
        if leaf not in arrays or is_traced(x) or not x.ndim or x.shape[0] <= 1:
            continue
        if isinstance(x, np.ndarray) or (
            isinstance(x, jax.Array)
            and (len(x.sharding.device_set) == 1 or _are_rows_split(mesh, x))
        ):
            yield i, leaf


def _are_rows_split(mesh: ReplicaMesh, array: jax.Array) -> bool:
    """Whether replicas have different rows of an array on their devices."""
    if array.sharding.is_fully_replicated:
        return False
    parts = array.sharding.devices_indices_map(array.shape)
    rows = {
        frozenset(
            (parts[device][0].start, parts[device][0].stop)
            for device in mesh.devices_of(replica)
            if device in parts
        )
        for replica in range(mesh.num_replicas)
    }
    return len(rows) > 1


def _name_arguments(call: ReplicaCall, leaves: Sequence[int], labels: Sequence[str]) -> str:
    describe = descriptions.describe_array
    named = [f"'{labels[i]}' {describe(call.leaves[i])}" for i in leaves[:_MAX_NAMED]]
    more = f" and {len(leaves) - _MAX_NAMED} more" if len(leaves) > _MAX_NAMED else ""
    return ", ".join(named) + more
