"""Ways to all-reduce other than the one that XLA chooses: by one replica, and by groups of them.

Inside a replica function, on lists of arrays; every replica gets the same result. Their gradients
are the same all-reduce of the upstream gradients, as that of `collectives.all_reduce`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpudist.programs.replica_equality import EQUALIZING_FUNCTION
from tpudist.reduce_op import ReduceOp
from tpudist.xla import collectives
from tpudist.xla.packing import Packing

Accumulate = Callable[[list[jax.Array]], Any]


def reduce_on_one_replica(
    op: ReduceOp, arrays: Sequence[jax.Array], root: int, accumulate: Accumulate | None
) -> list[jax.Array]:
    """All values travel to replica `root`, which combines them and sends the result to all.

    Args:
        op: How they combine.
        arrays: The values.
        root: The replica.
        accumulate: The sum of a list of arrays, in the order of the replicas; by default they are
            added in this order.

    Cost: the root receives n - 1 times the bytes of `arrays`.
    """

    def one(x: jax.Array) -> jax.Array:
        parts = _collect_at(root, x)
        result = jnp.asarray(_fold(op, parts) if accumulate is None else accumulate(parts))
        if result.shape != x.shape:
            raise ValueError(
                f"accumulation_fn returned an array of shape {result.shape} for arrays of shape "
                f"{x.shape}. It must add the arrays of a list, elementwise."
            )
        return result.astype(x.dtype)

    def communicate(sent: list[jax.Array]) -> list[jax.Array]:
        return collectives.broadcast([one(x) for x in sent], root)

    # With a function of the user's, gradients are what they are: not equal, for all we know.
    send = communicate if accumulate is not None else _mark_equalizing(communicate)
    sent = collectives.widen_for_mean(op, list(arrays))
    reduced = collectives.run_collective(send, sent)
    return collectives.divide_by_replicas(reduced) if op is ReduceOp.MEAN else reduced


def reduce_in_groups(
    op: ReduceOp, arrays: Sequence[jax.Array], packing: Packing | None
) -> list[jax.Array]:
    """Combines within groups of neighbours, then across the groups, then tells the group.

    With a prime number of replicas there are no groups, and all combine at once.
    """
    n = collectives.num_replicas()
    size = group_size(n)
    if size == n:
        return collectives.all_reduce(op, list(arrays), packing)
    within = [list(range(i, i + size)) for i in range(0, n, size)]
    across = [list(range(i, n, size)) for i in range(size)]

    def communicate(sent: list[jax.Array]) -> list[jax.Array]:
        sent = collectives.combine(op, sent, within)
        sent = collectives.combine(op, sent, across)
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            return sent
        # Each member of a group has asked another member of each group: the sums are equal, but
        # whether to the last bit is up to the network. So all take that of the first ones.
        first = jax.lax.axis_index(collectives.replica_axis()) % size == 0
        sent = [jnp.where(first, x, jnp.zeros_like(x)) for x in sent]
        return collectives.combine(ReduceOp.SUM, sent, within)

    sent = collectives.widen_for_mean(op, list(arrays))
    reduced = collectives.run_collective(_mark_equalizing(communicate), sent, packing)
    return collectives.divide_by_replicas(reduced) if op is ReduceOp.MEAN else reduced


def _mark_equalizing(communicate: Callable[[list[jax.Array]], Any]) -> Callable[..., Any]:
    """Lets `replica_equality` know, by the name, that the results and their gradients are equal."""
    communicate.__name__ = communicate.__qualname__ = EQUALIZING_FUNCTION
    return jax.jit(communicate)


def group_size(num_replicas: int) -> int:
    """Replicas in a group: 4 of 8, 8 of 32; all if the number is prime."""
    groups = math.isqrt(num_replicas)
    while num_replicas % groups:
        groups -= 1
    return num_replicas // groups


def _collect_at(root: int, x: jax.Array) -> list[jax.Array]:
    """The values of all replicas, in order, as replica `root` has received them."""
    # A permute for each replica: an all-gather would bring to all what only the root needs.
    return [
        x if i == root else jax.lax.ppermute(x, collectives.replica_axis(), [(i, root)])
        for i in range(collectives.num_replicas())
    ]


def _fold(op: ReduceOp, parts: list[jax.Array]) -> jax.Array:
    combine = {ReduceOp.MIN: jnp.minimum, ReduceOp.MAX: jnp.maximum}.get(op, jnp.add)
    result = parts[0]
    for x in parts[1:]:
        result = combine(result, x)
    return result
