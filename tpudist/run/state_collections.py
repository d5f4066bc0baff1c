"""State in plain pytrees that replicas give back differently: combined, refused, or one for each.

Linen keeps parameters and running statistics in collections, by name, in a dict or a `TrainState`.
A result that is the new state of an argument (`returned_state`) must be equal on every replica if
it is parameters or optimizer state, as NNX's must; of running statistics the mean is taken.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from tpudist.reduce_op import ReduceOp
from tpudist.run import outputs
from tpudist.xla import replica_agreement

RULES = {"params": None, "opt_state": None, "batch_stats": "mean"}
"""The aggregation of a collection that differs; None where it must not."""

_NAME = re.compile(r"[A-Za-z_]\w*")


def place_collections(
    proof: replica_agreement.Agreement,
    returned: Mapping[int, int],
    labels: Sequence[str],
    dtypes: Sequence[Any],
    rules: Mapping[str, str],
    name: str,
    placed: tuple[list[bool], dict[ReduceOp | None, list[int]]],
) -> None:
    """Decides what becomes of the collections among the results, and notes it in `placed`.

    Args:
        proof: For each output, whether and why it differs.
        returned: The outputs that are state given back; each with the number of a label.
        labels: What the state is called, as `state.params['Dense_0']['kernel']`.
        dtypes: Of the outputs.
        rules: The user's own, by the name of the collection: first of all.
        name: Of the function.
        placed: Which outputs leave stacked, and which are aggregated; changed in place.

    Raises:
        ValueError: Parameters or optimizer state would differ between replicas.
    """
    stack, aggregated = placed
    refused = []
    for i, k in returned.items():
        collection = _collection_of(labels[k], rules)
        if not stack[i] or collection is None:
            continue
        rule = {**RULES, **rules}[collection]
        if rule == "none":
            continue
        cause = f"its new value depends on {proof.causes[i]}, and was not reduced over the replicas"
        whole = not jnp.issubdtype(dtypes[i], jnp.inexact)
        if rule is None or (rule == "mean" and whole):
            refused.append((f"'{labels[k]}'", cause, _remedy_of(collection)))
            continue
        op = None if rule == "only_first_replica" else ReduceOp[rule.upper()]
        aggregated.setdefault(op, []).append(i)
        stack[i] = False
    if refused:
        raise ValueError(outputs.describe_divergence(name, refused))


def _collection_of(label: str, rules: Mapping[str, str]) -> str | None:
    """The innermost collection that the path of some state goes through."""
    names = _NAME.findall(label)
    return next((x for x in reversed(names) if x in rules or x in RULES), None)


def _remedy_of(collection: str) -> str:
    rule = f"RunOptions(aggregation={{'{collection}': 'mean'}})"
    if collection in ("params", "opt_state"):
        return (
            f"Reduce the gradients before they are applied: jax.lax.pmean(grads, 'replica'), or "
            f"tpudist.get_replica_context().all_reduce('mean', grads). If each replica is to keep "
            f"its own, say so: RunOptions(aggregation={{'{collection}': 'none'}})."
        )
    return f"Reduce it in the function, or give it a rule: {rule}, 'sum', or 'none' to keep each."
