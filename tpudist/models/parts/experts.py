"""A mixture of experts in place of a transformer's MLP: each token is computed by a few of many.

A router scores the experts for each token; the best `experts_per_token` of them compute it, and
their outputs are added with weights that sum to 1. Each expert has room for `expert_capacity` times
its equal share of a row's tokens; a choice that finds its expert full is dropped (the token keeps
what the residual stream and its other experts give it) and counted.

Rows are routed one by one, and tokens find room in order of position. So nothing depends on how
rows are spread over devices, and no token on what follows it.

Logical names: the weights' `expert` dim goes to the mesh axis `expert`, which splits the batch as
well. Tokens go to their experts and come back by an all-to-all over that axis.

Sources: GShard (arXiv 2006.16668) for capacity, Mixtral (2401.04088) for the weights, DeepSeek-V3
(2412.19437, section 2.1.2) for a balance loss of each row.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tpudist.models.parts.activation import activate
from tpudist.models.parts.logical import constrain


class ExpertSettings(Protocol):
    """The fields of `TransformerConfig` that this module reads; it documents them."""

    @property
    def num_experts(self) -> int:
        """0 for a plain MLP."""
        ...

    @property
    def experts_per_token(self) -> int:
        """Number of experts that compute each token."""
        ...

    @property
    def expert_capacity(self) -> float:
        """Room of each expert, as a multiple of its equal share of a row's tokens."""
        ...


class Routing(NamedTuple):
    """How evenly the tokens of each row were spread over the experts; float32."""

    imbalance: jax.Array
    """`[batch]`: 1 where all experts are equally likely, up to `num_experts`; differentiable."""
    dropped: jax.Array
    """`[batch]`: the share of choices that found their expert full."""


class Assignment(NamedTuple):
    """Which choice of a token is computed where. A slot is an expert's room for one token."""

    slot_of_choice: jax.Array
    """`[batch, length * experts_per_token]`: its slot; the number of slots if it is dropped."""
    choice_of_slot: jax.Array
    """`[batch, num_experts * capacity]`: its choice; the number of choices if it is empty."""


def check(config: ExpertSettings) -> None:
    """Refuses a choice of experts that cannot be made.

    Raises:
        ValueError: There are fewer experts than a token is to have, or no room in any.
    """
    if config.num_experts < 0:
        raise ValueError(
            f"num_experts={config.num_experts}: it must not be negative. Use 0 for a plain MLP."
        )
    if not config.num_experts:
        return
    if config.experts_per_token > config.num_experts:
        raise ValueError(
            f"experts_per_token={config.experts_per_token}, but num_experts={config.num_experts}: "
            f"each token goes to different experts. Use at most {config.num_experts}."
        )
    if not config.expert_capacity > 0:
        raise ValueError(
            f"expert_capacity={config.expert_capacity} leaves the experts no space. It is a "
            "multiple of their equal share of a row's tokens. Use 1.25, or "
            f"{config.num_experts / config.experts_per_token:g} so that no token is ever dropped."
        )


def capacity(length: int, config: ExpertSettings) -> int:
    """Number of slots that each expert has for a row of `length` tokens."""
    share = length * config.experts_per_token / config.num_experts
    # A token chooses an expert once at most.
    return min(length, math.ceil(config.expert_capacity * share))


def mlp(
    x: jax.Array, weights: dict[str, jax.Array], config: ExpertSettings
) -> tuple[jax.Array, Routing]:
    """The output of the experts `[batch, length, embed]`, and how the tokens were spread.

    Args:
        x: `[batch, length, embed]`.
        weights: `router` `[embed, expert]`, `mlp_in` `[expert, embed, branches, mlp]` and `mlp_out`
            `[expert, mlp, embed]`.
        config: Number of experts, choices per token, and capacity.

    Cost: an all-to-all of the slots' tokens to the experts and one back, over the axis `expert`.
    """
    batch, length, embed = x.shape
    each, slots = config.experts_per_token, capacity(length, config)
    x = constrain(x, "batch", None, None)
    probabilities = jax.nn.softmax(x.astype(jnp.float32) @ weights["router"].astype(jnp.float32))
    shares, chosen = choose(probabilities, each)
    to, back = assign(chosen.reshape(batch, -1), config.num_experts, slots)

    token_of_slot = back // each  # the number of tokens if it is empty
    sent = _move(x, token_of_slot, to.reshape(batch, length, each))
    sent = sent.reshape(batch, config.num_experts, slots, embed)
    sent = constrain(sent, "batch", None, None, None)
    out = _apply(constrain(sent, "expert_batch", "expert", "sequence", None), weights)
    out = constrain(out, "expert_batch", "expert", "sequence", None)
    out = constrain(out, "batch", None, None, None)
    received = _move(out.reshape(batch, -1, embed), to, back[..., None])
    received = received.reshape(batch, length, each, embed)
    y = jnp.einsum("blke,blk->ble", received, shares.astype(x.dtype))

    dropped = jnp.mean(to == config.num_experts * slots, axis=-1, dtype=jnp.float32)
    routing = Routing(imbalance(probabilities, chosen), dropped)
    return constrain(y, "batch", None, None), routing


def choose(probabilities: jax.Array, each: int) -> tuple[jax.Array, jax.Array]:
    """The `each` likeliest experts `[..., each]` of a token, and their shares, which sum to 1.

    Args:
        probabilities: `[..., expert]`, positive.
        each: How many experts a token is sent to.

    Returns:
        Shares and experts, the likeliest first; the first of equals.
    """
    chosen = jax.lax.top_k(jax.lax.stop_gradient(probabilities), each)[1]
    # Not by index, whose gradient would be a scatter.
    taken = jax.nn.one_hot(chosen, probabilities.shape[-1], dtype=probabilities.dtype)
    likeliest = jnp.sum(taken * probabilities[..., None, :], axis=-1)
    return likeliest / likeliest.sum(axis=-1, keepdims=True), chosen


def assign(chosen: jax.Array, num_experts: int, slots: int) -> Assignment:
    """Gives choices a slot of their expert, in order, until it is full.

    Args:
        chosen: `[batch, choice]`, the expert of each.
        num_experts: Number of experts.
        slots: Number of slots of each expert.
    """
    num_choices = chosen.shape[-1]
    taken = jax.nn.one_hot(chosen, num_experts, dtype=jnp.int32)
    # Who comes first is served first: a choice's rank is how many before it chose the same expert.
    # So what is dropped does not depend on later tokens.
    before = jnp.cumsum(taken, axis=1) - taken
    rank = jnp.sum(before * taken, axis=-1)
    slot_of_choice = jnp.where(rank < slots, chosen * slots + rank, num_experts * slots)

    # The inverse by sorting, since a TPU scatters slowly. The sort is stable: the choices of an
    # expert stand together, in order, and the nth of them has its nth slot.
    in_order = jnp.argsort(chosen, axis=-1, stable=True)
    count = taken.sum(axis=1)
    first = jnp.cumsum(count, axis=-1) - count
    nth = jnp.arange(slots)
    where = jnp.where(nth < count[..., None], first[..., None] + nth, num_choices)
    choice_of_slot = _take(in_order, where.reshape(len(chosen), -1), num_choices)
    return Assignment(slot_of_choice, choice_of_slot)


def imbalance(probabilities: jax.Array, chosen: jax.Array) -> jax.Array:
    """`[batch]`: the experts' shares of choices times their mean probabilities, 1 if all are equal.

    Args:
        probabilities: `[batch, length, expert]`.
        chosen: `[batch, length, choice]`.
    """
    num_experts = probabilities.shape[-1]
    share = jax.nn.one_hot(chosen, num_experts, dtype=jnp.float32).mean(axis=(1, 2))
    return num_experts * jnp.sum(share * probabilities.mean(axis=1), axis=-1)


def _apply(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Each expert's MLP on its own slots: `[batch, expert, slot, embed]` to the same."""
    into, back = weights["mlp_in"].astype(x.dtype), weights["mlp_out"].astype(x.dtype)
    hidden = jnp.einsum("xsce,sefm->xscfm", x, into)
    hidden = constrain(hidden, "expert_batch", "expert", "sequence", None, "mlp")
    hidden = checkpoint_name(hidden, "mlp_in")
    hidden = activate(*(hidden[..., branch, :] for branch in range(hidden.shape[3])))
    return jnp.einsum("xscm,sme->xsce", hidden, back)


@jax.custom_vjp
def _move(values: jax.Array, source: jax.Array, uses: jax.Array) -> jax.Array:
    """`values[b, source[b, i]]`, or 0 where there is none: `[batch, i, embed]`.

    Args:
        values: `[batch, j, embed]`.
        source: `[batch, i]`; `j` for none.
        uses: `[batch, j, use]`, where each value went: the inverse of `source`; `i` for nowhere.
            With it the gradient is a gather as well, where JAX would scatter.
    """
    return _take(values, source, 0)


def _move_forward(values, source, uses):
    return _move(values, source, uses), uses


def _move_backward(uses, gradient):
    return sum(_take(gradient, uses[..., i], 0) for i in range(uses.shape[-1])), None, None


_move.defvjp(_move_forward, _move_backward)


def _take(values: jax.Array, index: jax.Array, fill: int) -> jax.Array:
    """`values[b, index[b, i]]`, and `fill` where the index is out of range."""
    return jax.vmap(lambda row, i: row.at[i].get(mode="fill", fill_value=fill))(values, index)
