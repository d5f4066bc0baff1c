"""What a replica function must not do, and what it is told: name, cause, rule and remedy.

State that replicas share must not differ between them, replicas must not disagree on whether to
communicate, and state must not be a constant of the program.
"""

from collections.abc import Sequence
from typing import Any

from tpudist import nnx_state
from tpudist.reduce_op import ReduceOp, VariableAggregation
from tpudist.variables import Variable
from tpudist.xla import agreement, compile
from tpudist.xla.mesh import ReplicaMesh


def place_outputs(
    proof: agreement.Agreement,
    variables: Sequence[Variable],
    nnx_leaves: Sequence[int],
    binding: nnx_state.Binding | None,
    name: str,
    num_replicas: int,
    whole: bool = False,
) -> tuple[list[bool], dict[ReduceOp | None, list[int]]]:
    """Decides what becomes of each output of a trace, by the proof of what is equal.

    Args:
        proof: For each output, in order: results, Variables, NNX leaves.
        variables: The Variables that were assigned.
        nnx_leaves: The leaves of `binding` that were changed; one may occur several times.
        binding: The NNX objects.
        name: Of the function.
        num_replicas: How many replicas there are.
        whole: Whether it is a function of all replicas: what replicas share out is summed already.

    Returns:
        Which outputs leave stacked, one part per replica; and, by reduction (None for the first
        replica's value), those that the replicas combine at the end of the step.

    Raises:
        ValueError: State that replicas share would differ between them.
    """
    stack = [x and num_replicas > 1 for x in proof.differs]
    aggregated: dict[ReduceOp | None, list[int]] = {}
    refused = []
    k = len(stack) - len(variables) - len(nnx_leaves)
    for v in variables:
        if stack[k] and not v.on_read:
            refused.append((f"Variable '{v.name}'", proof.causes[k], _VARIABLE_REMEDY))
        stack[k] = v.on_read
        k += 1
    for i in nnx_leaves:
        assert binding is not None
        rule = binding.aggregation(i)
        # Of a sum each replica holds its own share, even if it is as large as the others'.
        shares = rule is VariableAggregation.SUM and num_replicas > 1 and not whole
        if stack[k] or shares:
            if rule is None or rule is VariableAggregation.NONE:
                remedy = _remedy_of(binding.kinds[i].__name__)
                refused.append((binding.name(i), proof.causes[k], remedy))
            elif rule is VariableAggregation.ONLY_FIRST_REPLICA:
                aggregated.setdefault(None, []).append(k)
            else:
                op = ReduceOp.from_variable_aggregation(rule)
                aggregated.setdefault(op, []).append(k)
            stack[k] = False
        k += 1
    if refused:
        raise ValueError(_divergence(name, refused))
    return stack, aggregated


_VARIABLE_REMEDY = (
    "All-reduce what is assigned (tpudist.get_replica_context().all_reduce('sum', value)), give "
    "the Variable an aggregation (tpudist.VariableAggregation.MEAN, SUM or ONLY_FIRST_REPLICA), or "
    "make it ON_READ if each replica should have its own."
)


def _remedy_of(kind: str) -> str:
    if kind in ("Param", "OptState", "OptVariable", "OptArray"):
        return (
            "All-reduce the gradients before they are applied "
            "(tpudist.get_replica_context().all_reduce('mean', grads)), or apply them with "
            "tpudist.Optimizer, which does."
        )
    return (
        f"All-reduce what it is computed from, or give the Variable a rule: "
        f"{kind}(value, aggregation='mean'), 'sum' or 'only_first_replica'. nnx.BatchStat and the "
        f"state of nnx.metrics.Average have one."
    )


def _divergence(name: str, refused: list[tuple[str, Any, str]]) -> str:
    what, cause, remedy = refused[0]
    rest = [w for w, _, _ in refused[1:]]
    shown = ", ".join(rest[:4]) + (f" and {len(rest) - 4} more" if len(rest) > 4 else "")
    also = f" So would {shown}." if rest else ""
    return (
        f"{what} would differ between replicas after '{name}': its new value depends on {cause}, "
        f"and was not reduced over the replicas.{also} State that every replica shares must stay "
        f"equal on all of them. {remedy}"
    )


def check_hazards(proof: agreement.Agreement, name: str) -> None:
    """Refuses a program in which replicas could wait for each other for ever."""
    for hazard in proof.hazards:
        where = f" (at {hazard.where})" if hazard.where else ""
        raise ValueError(
            f"'{name}' has a {hazard.collective} between replicas in a branch or loop{where} whose "
            f"condition depends on {hazard.cause}. Replicas that disagree would wait for each "
            f"other for ever. Reduce the condition over the replicas first, or move the "
            f"communication out."
        )


def check_communication(proof: agreement.Agreement, mesh: ReplicaMesh, name: str) -> None:
    """Refuses collectives that XLA answers with an internal error, or by ending the process.

    Those of the replica context are safe; a function may also call `jax.lax.psum` itself.
    """
    if mesh.devices_per_replica == 1:
        return
    for one in proof.communication:
        where = f" (at {one.where})" if one.where else ""
        if mesh.num_replicas == 1:
            problem = "there is one replica, and XLA refuses collectives of one"
        elif one.moves_16_bit_floats and mesh.platform == "cpu":
            problem = (
                "XLA:CPU aborts the process on those of 16-bit floats in replicas of many devices"
            )
        else:
            continue
        raise ValueError(
            f"'{name}' calls {one.collective} over '{mesh.replica_axis}' by itself{where}, but "
            f"{problem}. Use tpudist.get_replica_context().all_reduce or all_gather, which know."
        )


def check_constants(program: compile.ReplicaProgram, name: str) -> None:
    """Refuses a program that carries state or data as constants, which would never change."""
    for array in compile.constant_arrays(program):
        for variable in nnx_state.holders_of(array):
            raise ValueError(
                f"'{name}' uses an NNX object that it captures: the {type(variable).__name__} "
                f"{compile.describe(array)} would be frozen into the program as a constant, and "
                f"never change. Pass the object as an argument: strategy.run({name}, args=(model, "
                f"...))."
            )
    for array in compile.large_constants(program):
        raise ValueError(
            f"'{name}' captures an array {compile.describe(array)} of {array.nbytes / 2**20:.1f} "
            f"MiB, which would be frozen into the program as a constant. Arrays above "
            f"{compile.MAX_CONSTANT_BYTES / 2**20:.0f} MiB must be passed as arguments: "
            f"strategy.run({name}, args=(array, ...))."
        )
