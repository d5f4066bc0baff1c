"""Where the outputs of a replica function go: those that may differ, and state that may not."""

from collections.abc import Collection, Mapping, Sequence

from tpudist.programs import replica_agreement
from tpudist.reduce_op import ReduceOp, VariableAggregation
from tpudist.run.captures import LocalState
from tpudist.state import nnx_binding
from tpudist.state.variable import Variable
from tpudist.values.drift import advice_on_value


def place_outputs(
    proof: replica_agreement.Agreement,
    variables: Sequence[Variable],
    nnx_leaves: Sequence[tuple[int, int]],
    parts: Collection[tuple[int, int]],
    binding: nnx_binding.Binding | None,
    name: str,
    num_replicas: int,
    whole: bool = False,
    rules: Mapping[str, str] | None = None,
    is_nested: bool = False,
    not_sums: Collection[int] = (),
) -> tuple[list[bool], dict[ReduceOp | None, list[int]]]:
    """Decides what becomes of each output of a trace, by the proof of what is equal.

    Args:
        proof: For each output, in order: results, Variables, NNX leaves.
        variables: The Variables that were assigned.
        nnx_leaves: The leaves of `binding` that were changed, each with an array of it.
        parts: Those that are one for each replica, and stay so.
        binding: The NNX objects.
        name: Of the function.
        num_replicas: How many replicas there are.
        whole: Whether it is a function of all replicas: what replicas share out is summed already.
        rules: How NNX Variables combine; see `RunOptions.aggregation`.
        is_nested: Whether the trace is a part of another one.
        not_sums: The leaves of NNX's averages that the function does not add to.

    Returns:
        Which outputs leave stacked, one part per replica; and, by reduction (None for the first
        replica's value), those that the replicas combine at the end of the step.

    Raises:
        ValueError: State that replicas share would differ between them.
        LocalState: NNX Variables must hold one value for each replica first.
    """
    local: list[tuple[int, int]] = []
    stack = [x and num_replicas > 1 for x in proof.differs]
    aggregated: dict[ReduceOp | None, list[int]] = {}
    refused = []
    k = len(stack) - len(variables) - len(nnx_leaves)
    for v in variables:
        if v.is_counted and num_replicas > 1 and not whole:
            aggregated.setdefault(ReduceOp.SUM, []).append(k)
        elif stack[k] and not v.on_read:
            remedy = v.remedy or VARIABLE_REMEDY
            refused.append((f"Variable '{v.name}'", proof.describe_cause(k), remedy))
        stack[k] = v.on_read
        k += 1
    for at in nnx_leaves:
        assert binding is not None
        i, _ = at
        if at in parts:
            stack[k] = True
            k += 1
            continue
        rule = None if i in not_sums else binding.aggregation(i, rules or {})
        # Of a sum each replica holds its own share, even if it is as large as the others'.
        shares = rule is VariableAggregation.SUM and num_replicas > 1 and not whole
        if stack[k] or shares:
            if rule is VariableAggregation.NONE:
                local.append(at)
                k += 1
                continue
            if rule is None:
                remedy = remedy_of(binding.types[i].__name__)
                refused.append((binding.name(i), proof.describe_cause(k), remedy))
            elif rule is VariableAggregation.ONLY_FIRST_REPLICA:
                aggregated.setdefault(None, []).append(k)
            else:
                op = ReduceOp.from_variable_aggregation(rule)
                aggregated.setdefault(op, []).append(k)
            stack[k] = False
        k += 1
    if refused:
        raise ValueError(describe_divergence(name, refused))
    if local and not is_nested:
        raise LocalState(local)
    return stack, aggregated


VARIABLE_REMEDY = (
    "All-reduce the value that you assign (tpudist.get_replica_context().all_reduce('sum', "
    "value)), give the Variable an aggregation (tpudist.VariableAggregation.MEAN, SUM or "
    "ONLY_FIRST_REPLICA), or make it ON_READ if each replica should have its own value."
)


def remedy_of(kind: str) -> str:
    """What to do about an NNX Variable of this kind that would differ between replicas."""
    if kind in ("Param", "OptState", "OptVariable", "OptArray"):
        return (
            "All-reduce the gradients before you apply them: "
            "tpudist.get_replica_context().all_reduce('mean', grads), or 'sum' for a loss divided "
            "by the rows of all replicas (compute_average_loss). tpudist.Optimizer does this "
            "itself."
        )
    return (
        "All-reduce the values that it is computed from, or give the Variable a rule: "
        f"{kind}(value, aggregation='mean'), 'sum', 'max', 'min', 'only_first_replica', or 'none' "
        "for one value for each replica. nnx.BatchStat and the state of nnx.metrics.Average have a "
        "rule. The state of a subclass with its own update() has none: if it adds up rows, use "
        "self.total = nnx.metrics.MetricState(0.0, aggregation='sum')."
    )


def describe_structure_change(name: str, change: str) -> str:
    """The refusal of a function that changes the structure of an NNX object in some way."""
    return (
        f"'{name}' changed the structure of an NNX object: {change}. A replica function may change "
        "only the values of Variables. Change a copy in the function, model = nnx.clone(model), "
        "for example for init_cache; or change the object before strategy.run. If a module has "
        "sown values, take them out in the function, and return them: nnx.pop(model, "
        "nnx.Intermediate)."
    )


def describe_divergence(name: str, refused: list[tuple[str, str, str]]) -> str:
    """The refusal of state that replicas share, and that would differ between them.

    Args:
        name: Of the function.
        refused: What it is, how that is known, and what to do; there is one at least.
    """
    what, reason, remedy = refused[0]
    rest = [w for w, _, _ in refused[1:]]
    shown = ", ".join(rest[:4]) + (f" and {len(rest) - 4} more" if len(rest) > 4 else "")
    also = f" So would {shown}." if rest else ""
    return (
        f"{what} would differ between replicas after '{name}': {reason}.{also} "
        f"State that every replica shares must stay "
        f"equal on all of them. {remedy}{advice_on_value(what for what, _, _ in refused)}"
    )
