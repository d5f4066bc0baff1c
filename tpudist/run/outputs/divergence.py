"""Error texts for state that a replica function may not change as it does."""

from tpudist.values.drift import advice_on_value

_MAX_NAMED = 4  # states in an error, in addition to the first
VARIABLE_REMEDY = (
    "All-reduce the value that you assign (tpudist.get_replica_context().all_reduce('sum', "
    "value)), give the Variable an aggregation (tpudist.VariableAggregation.MEAN, SUM or "
    "ONLY_FIRST_REPLICA), or make it ON_READ if each replica should have its own value."
)


def remedy_of(kind: str) -> str:
    """Returns the remedy for an NNX Variable of this kind that would differ between replicas."""
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
    """Returns the error for the function `name`, which changes the structure of an NNX object."""
    return (
        f"'{name}' changed the structure of an NNX object: {change}. A replica function may change "
        "only the values of Variables. Change a copy in the function, model = nnx.clone(model), "
        "for example for init_cache; or change the object before strategy.run. If a module has "
        "sown values, take them out in the function, and return them: nnx.pop(model, "
        "nnx.Intermediate)."
    )


def describe_divergence(name: str, refused: list[tuple[str, str, str]]) -> str:
    """Returns the error for shared state that would differ between replicas.

    `refused` has for each such state, at least one, its name, the cause, and the remedy.
    """
    state, reason, remedy = refused[0]
    others = [name for name, _, _ in refused[1:]]
    more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
    also = f" So would {', '.join(others[:_MAX_NAMED])}{more}." if others else ""
    return (
        f"{state} would differ between replicas after '{name}': {reason}.{also} "
        f"State that every replica shares must stay "
        f"equal on all of them. {remedy}{advice_on_value(x for x, _, _ in refused)}"
    )
