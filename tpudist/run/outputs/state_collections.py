"""State in plain pytrees that replicas give back differently: combined, refused, or one for each.

Linen keeps parameters and running statistics in collections, by name, in a dict or a `TrainState`.
A result that is the new state of an argument (`returned_state`) must be equal on every replica if
it is parameters or optimizer state, as NNX's must, and certainly no gradient of them; of running
statistics the mean is taken.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.programs import replica_agreement
from tpudist.reduce_op import ReduceOp
from tpudist.run.outputs import outputs

RULES = {"params": None, "opt_state": None, "batch_stats": "mean"}
"""The aggregation of a collection that differs; None where it must not."""

_MOST_NAMES = 10
_RESULT = "result"
_NAME = re.compile(r"[A-Za-z_]\w*")


def place_collections(
    proof: replica_agreement.Agreement,
    labels: Mapping[int, str],
    certain: Collection[int],
    dtypes: Sequence[Any],
    rules: Mapping[str, str],
    name: str,
    placed: tuple[list[bool], dict[ReduceOp | None, list[int]]],
) -> None:
    """Decides what becomes of the collections among the results, and notes it in `placed`.

    Args:
        proof: For each output, whether and why it differs.
        labels: The outputs that are state, and what it is called: for one
            `state.params['Dense_0']['kernel']`.
        certain: Those that are no gradients.
        dtypes: Of the outputs.
        rules: The user's own, by the name of the collection: first of all.
        name: Of the function.
        placed: Which outputs leave stacked, and which are aggregated; changed in place.

    Raises:
        ValueError: Parameters or optimizer state would differ between replicas.
    """
    stack, aggregated = placed
    differing = {i: (label, dtypes[i]) for i, label in labels.items() if stack[i]}
    causes = {i: proof.describe_cause(i) for i in differing}
    for i, op in decide(differing, certain, causes, rules, name).items():
        aggregated.setdefault(op, []).append(i)
        stack[i] = False


def find_collections(
    result: Any, differing: Sequence[int], rules: Mapping[str, str]
) -> dict[int, str]:
    """The leaves of a result whose own path names a collection that is reduced, with their labels.

    As of `{"batch_stats": ...}`, which `apply` gives beside the output, returned by itself.

    Args:
        result: How the result is nested.
        differing: The leaves in question.
        rules: The user's own, by the name of the collection.
    """
    if not differing:
        return {}
    labels = paths_of(result)
    known = {**RULES, **rules}
    return {
        i: labels[i]
        for i in differing
        if i in labels and known.get(collection_of(labels[i], rules) or "") not in (None, "none")
    }


def paths_of(result: Any) -> dict[int, str]:
    """What the leaves of a result are called, for one `result['batch_stats']['mean']`."""
    numbered = result.unflatten(range(result.num_leaves))
    paths = jax.tree_util.tree_flatten_with_path(numbered)[0]
    # Containers that JAX does not know are leaves here, and what they hold has no path.
    return {i: f"{_RESULT}{jax.tree_util.keystr(path)}" for path, i in paths if type(i) is int}


def find_replaced(
    results: Mapping[int, str], arguments: Mapping[int, str], rules: Mapping[str, str]
) -> dict[int, int]:
    """Returns the results that have the path of one argument from its collection on, with that.

    Args:
        results: The names of results, by number.
        arguments: The names of arguments, by number.
        rules: The user's rules, by the names of collections.
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
    """Says which of the user's rules are for collections that are nowhere; empty if none is."""
    names = {x for label in labels for x in _NAME.findall(label)} - {_RESULT}
    unknown = [f"'{x}'" for x in rules if x not in names]
    if not unknown:
        return ""
    there = sorted(x for x in names if x in RULES) or sorted(names)[:_MOST_NAMES]
    return (
        f"RunOptions(aggregation=...) has a rule for {', '.join(unknown)}, but no argument or "
        f"result of '{name}' has a collection of that name, so it has no effect. Use a name of: "
        f"{', '.join(there) or 'none'}."
    )


def decide(
    differing: Mapping[int, tuple[str, Any]],
    certain: Collection[int],
    causes: Mapping[int, str],
    rules: Mapping[str, str],
    name: str,
) -> dict[int, ReduceOp | None]:
    """By which reduction state that differs becomes one; None for the first replica's.

    What is not in the result stays one for each replica.

    Args:
        differing: Label and dtype of each such state.
        certain: Those that are no gradients of the state.
        causes: Why it differs.
        rules: The user's own, by the name of the collection: first of all.
        name: Of the function.

    Raises:
        ValueError: Parameters or optimizer state would differ between replicas.
    """
    decided: dict[int, ReduceOp | None] = {}
    refused = []
    for i, (label, dtype) in differing.items():
        collection = collection_of(label, rules)
        rule = "none" if collection is None else {**RULES, **rules}[collection]
        if collection is None or rule == "none" or (rule is None and i not in certain):
            continue
        if rule is None or (rule == "mean" and not jnp.issubdtype(dtype, jnp.inexact)):
            refused.append((f"'{label}'", causes[i], _remedy_of(collection)))
        else:
            decided[i] = None if rule == "only_first_replica" else ReduceOp[rule.upper()]
    if refused:
        raise ValueError(outputs.describe_divergence(name, refused))
    return decided


def collection_of(label: str, rules: Mapping[str, str]) -> str | None:
    """Returns the innermost collection that the path of some state goes through."""
    names = _NAME.findall(label)
    return next((x for x in reversed(names) if x in rules or x in RULES), None)


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
