"""All-reduces on one replica and in groups of replicas, where XLA would choose another algorithm.

Call these inside a replica function, on lists of arrays. Every replica gets the same result. The
gradient is the same all-reduce of the upstream gradients, as with `collectives.all_reduce`.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tpudist.programs.replica_equality import EQUALIZING_FUNCTION
from tpudist.reduce_op import ReduceOp
from tpudist.xla import collectives
from tpudist.xla.packing import Communicate, Packing

Accumulate = Callable[[list[jax.Array]], ArrayLike]


def reduce_on_one_replica(
    op: ReduceOp, arrays: Sequence[jax.Array], root: int, accumulate: Accumulate | None
) -> list[jax.Array]:
    """Sends all values to replica `root`, which combines them and sends the result to all.

    Args:
        op: The reduction.
        arrays: Values of this replica.
        root: Index of the replica that combines the values.
        accumulate: Called with the arrays of all replicas, in the order of the replicas; returns
            their sum. By default the arrays are added in this order.

    Cost: the root receives n - 1 times the bytes of `arrays`.
    """

    def combine_at_root(x: jax.Array) -> jax.Array:
        parts = _collect_at(root, x)
        result = jnp.asarray(_fold(op, parts) if accumulate is None else accumulate(parts))
        if result.shape != x.shape:
            raise ValueError(
                f"accumulation_fn returned an array of shape {result.shape} for arrays of shape "
                f"{x.shape}. It must add the arrays of a list, elementwise."
            )
        return result.astype(x.dtype)

    def communicate(sent: list[jax.Array]) -> list[jax.Array]:
        return collectives.broadcast([combine_at_root(x) for x in sent], root)

    # The gradient of a user's function may differ between replicas, so it gets no mark.
    send = communicate if accumulate is not None else _mark_equalizing(communicate)
    return _communicate_and_divide(op, arrays, send)


def reduce_in_groups(
    op: ReduceOp, arrays: Sequence[jax.Array], packing: Packing | None
) -> list[jax.Array]:
    """Combines the arrays within groups of neighbors, then across the groups.

    With n replicas, a collective then has about sqrt(n) members instead of n. With a prime number
    of replicas there are no groups, and all combine in one step.
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
        # The members of a group have added the same group sums, but each in its own collective.
        # These may add in different orders and differ in the last bit. So every member takes the
        # sum of the first one: a sum in which the others contribute zeros.
        first = jax.lax.axis_index(collectives.replica_axis()) % size == 0
        sent = [jnp.where(first, x, jnp.zeros_like(x)) for x in sent]
        return collectives.combine(ReduceOp.SUM, sent, within)

    return _communicate_and_divide(op, arrays, _mark_equalizing(communicate), packing)


def _communicate_and_divide(
    op: ReduceOp, arrays: Sequence[jax.Array], send: Communicate, packing: Packing | None = None
) -> list[jax.Array]:
    # A mean of integers is a sum of floats, divided at the end: the integer sum might overflow.
    sent = collectives.widen_for_mean(op, list(arrays))
    reduced = collectives.run_collective(send, sent, packing)
    return collectives.divide_by_replicas(reduced) if op is ReduceOp.MEAN else reduced


def _mark_equalizing(communicate: Communicate) -> Communicate:
    # `replica_equality` cannot derive from the equations that all replicas get the same result. It
    # recognizes the jit by this name, and then trusts its results and their gradients to be equal.
    communicate.__name__ = communicate.__qualname__ = EQUALIZING_FUNCTION
    return jax.jit(communicate)


def group_size(num_replicas: int) -> int:
    """Returns the number of replicas in a group: 4 of 8, 8 of 32; all if the number is prime."""
    groups = math.isqrt(num_replicas)
    while num_replicas % groups:
        groups -= 1
    return num_replicas // groups


def _collect_at(root: int, x: jax.Array) -> list[jax.Array]:
    """Returns the values of all replicas, in order; only on `root` are they correct."""
    # One permute per replica. An all-gather would send every value to every replica.
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
