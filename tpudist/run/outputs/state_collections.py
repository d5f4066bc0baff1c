"""Decides whether returned state in plain pytrees is combined, rejected, or kept per replica.

Linen keeps parameters and running statistics in named collections, in a dict or a `TrainState`. A
result that is the new state of an argument (`returned_state`) must be equal on every replica if it
is parameters or optimizer state, as in NNX, and certainly not a gradient of them. Running
statistics are averaged.
"""

import re
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from tpudist.programs import replica_agreement
from tpudist.reduce_op import ReduceOp
from tpudist.run.outputs import divergence
from tpudist.run.outputs.output_placement import OutputPlacement

_MUST_AGREE = "must agree"
RULES = {"params": _MUST_AGREE, "opt_state": _MUST_AGREE, "batch_stats": "mean"}
"""The rule for a collection that differs between replicas; see `RunOptions.aggregation`.

`_MUST_AGREE` raises an error then. It is not a rule for users, whose `"none"` keeps all values.
"""

_MAX_NAMES = 10  # in a warning
_RESULT = "result"
# A part of a printed path, such as `state.params['Dense_0']['ema-kernel']`. A key that is itself a
# path, such as 'params/Dense_0/kernel', has several parts.
_NAME = re.compile(r"[^\W\d](?:[\w -]*\w)?")


def place_collections(
    proof: replica_agreement.Agreement,
    labels: Mapping[int, str],
    not_gradients: Collection[int],
    dtypes: Sequence[np.dtype],
    rules: Mapping[str, str],
    name: str,
    placement: OutputPlacement,
) -> None:
    """Places the collections among the results; extends `placement`.

    Args:
        proof: For each output, whether and why it differs.
        labels: Names of the outputs that are state, such as
            `state.params['Dense_0']['kernel']`.
        not_gradients: The outputs that are certainly not gradients.
        rules: The user's rules, by name of the collection. They take precedence.

    Raises:
        ValueError: If parameters or optimizer state would differ between replicas.
    """
    differing = {i: (label, dtypes[i]) for i, label in labels.items() if placement.stacked[i]}
    causes = {i: proof.describe_cause(i) for i in differing}
    for i, op in decide(differing, not_gradients, causes, rules, name).items():
        placement.aggregate(i, op)


def find_collections(
    result: PyTreeDef, differing: Sequence[int], rules: Mapping[str, str]
) -> dict[int, str]:
    """Returns the `differing` leaves whose path names a collection with a reduction, with names.

    For example `{"batch_stats": ...}`, which `apply` returns next to the output.
    """
    if not differing:
        return {}
    labels = paths_of(result)
    return {
        i: labels[i]
        for i in differing
        if i in labels and _find_rule(labels[i], rules)[1] not in (_MUST_AGREE, "none")
    }


def paths_of(result: PyTreeDef) -> dict[int, str]:
    """Returns the names of the leaves of a result, such as `result['batch_stats']['mean']`."""
    numbered = result.unflatten(range(result.num_leaves))
    paths = jax.tree_util.tree_flatten_with_path(numbered)[0]
    # Containers that JAX cannot flatten are leaves here, and their contents have no path.
    return {i: f"{_RESULT}{jax.tree_util.keystr(path)}" for path, i in paths if type(i) is int}


def find_replaced(
    results: Mapping[int, str], arguments: Mapping[int, str], rules: Mapping[str, str]
) -> dict[int, int]:
    """Returns the numbers of results that replace an argument, with the number of the argument.

    Their names have the same path from the collection on, and no other argument has it.
    """

    def path_of(label: str) -> tuple[str, ...]:
        collection, names = collection_of(label, rules), _NAME.findall(label)
        if collection is None:
            return ()
        last = len(names) - 1 - names[::-1].index(collection)
        return tuple(names[last:])

    sources: dict[tuple[str, ...], list[int]] = {}
    for i, label in arguments.items():
        sources.setdefault(path_of(label), []).append(i)
    found = {i: sources.get(path, []) for i, label in results.items() if (path := path_of(label))}
    return {i: some[0] for i, some in found.items() if len(some) == 1}


def describe_unknown(rules: Mapping[str, str], labels: Sequence[str], name: str) -> str:
    """Returns a warning of rules for collections that do not exist; empty without such rules.

    `labels` are the names of all arguments, results and NNX kinds.
    """
    names = {x for label in labels for x in _NAME.findall(label)} - {_RESULT}
    unknown = [f"'{x}'" for x in rules if x not in names]
    if not unknown:
        return ""
    existing = sorted(x for x in names if x in RULES) or sorted(names)[:_MAX_NAMES]
    return (
        f"RunOptions(aggregation=...) has a rule for {', '.join(unknown)}, but no argument or "
        f"result of '{name}' has a collection of that name, so it has no effect. Use a name of: "
        f"{', '.join(existing) or 'none'}."
    )


def decide(
    differing: Mapping[int, tuple[str, np.dtype]],
    not_gradients: Collection[int],
    causes: Mapping[int, str],
    rules: Mapping[str, str],
    name: str,
) -> dict[int, ReduceOp | None]:
    """Returns the reductions that combine state which differs; None for the first replica's value.

    State that is not in the result keeps one value per replica.

    Args:
        differing: Name and dtype of each such state.
        not_gradients: The state that is certainly not a gradient.
        causes: Cause of the difference, for each such state.
        rules: The user's rules, by name of the collection. They take precedence.

    Raises:
        ValueError: If parameters or optimizer state would differ between replicas.
    """
    decided: dict[int, ReduceOp | None] = {}
    refused = []
    for i, (label, dtype) in differing.items():
        collection, rule = _find_rule(label, rules)
        if rule == "none" or (rule == _MUST_AGREE and i not in not_gradients):
            continue
        if rule == _MUST_AGREE or (rule == "mean" and not jnp.issubdtype(dtype, jnp.inexact)):
            refused.append((f"'{label}'", causes[i], _remedy_of(collection)))
        else:
            decided[i] = None if rule == "only_first_replica" else ReduceOp[rule.upper()]
    if refused:
        raise ValueError(divergence.describe_divergence(name, refused))
    return decided


def collection_of(label: str, rules: Mapping[str, str]) -> str | None:
    """Returns the innermost collection that the path of some state goes through."""
    names = _NAME.findall(label)
    return next((x for x in reversed(names) if x in rules or x in RULES), None)


def _find_rule(label: str, rules: Mapping[str, str]) -> tuple[str, str]:
    """Returns the collection of some state, and its rule; an empty name and "none" without one."""
    collection = collection_of(label, rules)
    if collection is None:
        return "", "none"
    return collection, rules.get(collection) or RULES[collection]


def _remedy_of(collection: str) -> str:
    rule = f"RunOptions(aggregation={{'{collection}': 'mean'}})"
    if collection in ("params", "opt_state"):
        return (
            "Reduce the gradients before you apply them: jax.lax.pmean(grads, 'replica'), or "
            "tpudist.get_replica_context().all_reduce('mean', grads), or 'sum' for a loss divided "
            "by the rows of all replicas (compute_average_loss). If each replica must keep its own "
            f"value, pass RunOptions(aggregation={{'{collection}': 'none'}})."
        )
    return (
        f"Reduce it in the function, or give it a rule: {rule}, 'sum', or 'none' to keep each "
        "value."
    )
