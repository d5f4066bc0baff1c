"""A mixture of experts instead of the MLP of a transformer: few of many experts compute each token.

A router scores the experts for each token. The best `experts_per_token` of them compute it, and
their outputs are added with weights that sum to 1. Each expert has room for `expert_capacity` times
its equal share of the tokens of a row. A choice whose expert is full is dropped and counted; the
token keeps the residual stream and the outputs of its other experts.

Rows are routed one by one, and tokens get slots in order of position. So results do not depend on
how rows are spread over devices, and no token depends on later tokens.

Logical names: the `expert` dim of the weights is split over the mesh axis `expert`, which splits
the batch as well. An all-to-all over that axis moves tokens to their experts and back.

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
    """Fields of `TransformerConfig` that this module reads; see there."""

    @property
    def num_experts(self) -> int:
        """Number of experts; 0 for a plain MLP."""
        ...

    @property
    def experts_per_token(self) -> int:
        """Number of experts per token."""
        ...

    @property
    def expert_capacity(self) -> float:
        """Slots of an expert, as a multiple of its equal share of the tokens of a row."""
        ...


class Routing(NamedTuple):
    """Spread of the tokens of each row over the experts; float32."""

    imbalance: jax.Array
    """`[batch]`: 1 if all experts are equally likely, up to `num_experts`; differentiable."""
    dropped: jax.Array
    """`[batch]`: share of the choices whose expert was full."""


class Assignment(NamedTuple):
    """Choices of tokens and slots of experts; a slot has room for one token."""

    slot_of_choice: jax.Array
    """`[batch, length * experts_per_token]`: slot of a choice; the number of slots if dropped."""
    choice_of_slot: jax.Array
    """`[batch, num_experts * capacity]`: choice in each slot; the number of choices if empty."""


def check(config: ExpertSettings) -> None:
    """Checks the settings of the experts.

    Raises:
        ValueError: If there are fewer experts than `experts_per_token`, or experts have no slots.
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
    """Returns the number of slots of each expert for a row of `length` tokens."""
    share = length * config.experts_per_token / config.num_experts
    # Rounded up, so that a capacity of 1 has a slot for every choice of evenly spread tokens; but
    # 1.1 * 50 is 55.00000000000001 in floating point. And a token chooses an expert at most once,
    # so more slots than tokens would stay empty.
    return min(length, math.ceil(round(config.expert_capacity * share, 6)))


def mlp(
    x: jax.Array, weights: dict[str, jax.Array], config: ExpertSettings
) -> tuple[jax.Array, Routing]:
    """Returns the output of the experts `[batch, length, embed]`, and the spread of the tokens.

    Args:
        x: `[batch, length, embed]`.
        weights: `router` `[embed, expert]`, `mlp_in` `[expert, embed, branches, mlp]` and `mlp_out`
            `[expert, mlp, embed]`.
        config: Number of experts, choices per token, and capacity.

    Cost: two all-to-alls over the axis `expert`, of the tokens in slots and of their outputs.
    """
    batch, length, embed = x.shape
    num_choices, slots_per_expert = config.experts_per_token, capacity(length, config)
    x = constrain(x, "batch", None, None)
    probabilities = jax.nn.softmax(x.astype(jnp.float32) @ weights["router"].astype(jnp.float32))
    shares, chosen = choose(probabilities, num_choices)
    slot_of_choice, choice_of_slot = assign(
        chosen.reshape(batch, -1), config.num_experts, slots_per_expert
    )

    # The choices of a token are neighbors. An empty slot has the number of choices, and so the
    # number of tokens here, which `_take` reads as none.
    token_of_slot = choice_of_slot // num_choices
    sent = _move(x, token_of_slot, slot_of_choice.reshape(batch, length, num_choices))
    sent = sent.reshape(batch, config.num_experts, slots_per_expert, embed)
    # These two pairs of constraints make XLA emit the all-to-alls: the same array, first split over
    # its rows, then over its experts.
    sent = constrain(sent, "batch", None, None, None)
    out = _apply(constrain(sent, "expert_batch", "expert", "sequence", None), weights)
    out = constrain(out, "expert_batch", "expert", "sequence", None)
    out = constrain(out, "batch", None, None, None)
    received = _move(out.reshape(batch, -1, embed), slot_of_choice, choice_of_slot[..., None])
    received = received.reshape(batch, length, num_choices, embed)
    y = jnp.einsum("blke,blk->ble", received, shares.astype(x.dtype))

    dropped = jnp.mean(
        slot_of_choice == config.num_experts * slots_per_expert, axis=-1, dtype=jnp.float32
    )
    routing = Routing(imbalance(probabilities, chosen), dropped)
    return constrain(y, "batch", None, None), routing


def choose(probabilities: jax.Array, num_choices: int) -> tuple[jax.Array, jax.Array]:
    """Returns the shares, which sum to 1, and the numbers of the likeliest experts of each token.

    Args:
        probabilities: `[..., expert]`, positive.
        num_choices: Number of experts per token.

    Returns:
        Shares and experts `[..., choice]`, the likeliest first, and the first of equal ones.
    """
    # The choice has no gradient; the shares below carry it to the router.
    chosen = jax.lax.top_k(jax.lax.stop_gradient(probabilities), num_choices)[1]
    # A product with one-hot rows, because the gradient of indexing would be a scatter.
    one_hot = jax.nn.one_hot(chosen, probabilities.shape[-1], dtype=probabilities.dtype)
    likeliest = jnp.sum(one_hot * probabilities[..., None, :], axis=-1)
    return likeliest / likeliest.sum(axis=-1, keepdims=True), chosen


def assign(chosen: jax.Array, num_experts: int, slots_per_expert: int) -> Assignment:
    """Assigns slots of the experts to choices, in order, until an expert is full.

    Args:
        chosen: `[batch, choice]`, the expert of each choice.
        num_experts: Number of experts.
        slots_per_expert: Number of slots of each expert.
    """
    num_choices = chosen.shape[-1]
    one_hot = jax.nn.one_hot(chosen, num_experts, dtype=jnp.int32)
    # The rank of a choice is the number of earlier choices of the same expert, and its slot. So
    # later tokens cannot cause a drop.
    before = jnp.cumsum(one_hot, axis=1) - one_hot
    rank = jnp.sum(before * one_hot, axis=-1)
    has_slot = rank < slots_per_expert
    slot = chosen * slots_per_expert + rank
    slot_of_choice = jnp.where(has_slot, slot, num_experts * slots_per_expert)

    # The inverse is computed by sorting, because scatters are slow on TPUs. The sort is stable: the
    # choices of an expert are together, in order, and the nth of them has the nth slot.
    in_order = jnp.argsort(chosen, axis=-1, stable=True)
    count = one_hot.sum(axis=1)
    first = jnp.cumsum(count, axis=-1) - count
    nth = jnp.arange(slots_per_expert)
    sorted_index = jnp.where(nth < count[..., None], first[..., None] + nth, num_choices)
    choice_of_slot = _take(in_order, sorted_index.reshape(len(chosen), -1), num_choices)
    return Assignment(slot_of_choice, choice_of_slot)


def imbalance(probabilities: jax.Array, chosen: jax.Array) -> jax.Array:
    """Returns `[batch]`: shares of choices times mean probabilities, which is 1 if all are equal.

    Args:
        probabilities: `[batch, length, expert]`.
        chosen: `[batch, length, choice]`.
    """
    num_experts = probabilities.shape[-1]
    share = jax.nn.one_hot(chosen, num_experts, dtype=jnp.float32).mean(axis=(1, 2))
    # Only the probabilities are differentiable; the share of choices is a count. So training moves
    # probability away from experts that are chosen often.
    return num_experts * jnp.sum(share * probabilities.mean(axis=1), axis=-1)


def _apply(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Applies the MLP of each expert to its slots `[batch, expert, slot, embed]`."""
    # In these products: x batch, s expert, c slot, e embed, f branch, m mlp.
    into, back = weights["mlp_in"].astype(x.dtype), weights["mlp_out"].astype(x.dtype)
    hidden = jnp.einsum("xsce,sefm->xscfm", x, into)
    hidden = constrain(hidden, "expert_batch", "expert", "sequence", None, "mlp")
    hidden = checkpoint_name(hidden, "mlp_in")
    hidden = activate(*(hidden[..., branch, :] for branch in range(hidden.shape[3])))
    return jnp.einsum("xscm,sme->xsce", hidden, back)


@jax.custom_vjp
def _move(values: jax.Array, source: jax.Array, uses: jax.Array) -> jax.Array:
    """Returns `values[b, source[b, i]]` as `[batch, i, embed]`, or 0 without a source.

    Args:
        values: `[batch, j, embed]`.
        source: `[batch, i]`; the size of `j` for no source.
        uses: Inverse of `source`, `[batch, j, use]`; the size of `i` for an unused value. It makes
            the gradient a gather too, where JAX would scatter.
    """
    return _take(values, source, 0)


def _move_forward(values, source, uses):
    return _move(values, source, uses), uses


def _move_backward(uses, gradient):
    return sum(_take(gradient, uses[..., i], 0) for i in range(uses.shape[-1])), None, None


_move.defvjp(_move_forward, _move_backward)


def _take(values: jax.Array, index: jax.Array, fill: int) -> jax.Array:
    """Returns `values[b, index[b, i]]`, or `fill` if the index is out of range."""
    return jax.vmap(lambda row, i: row.at[i].get(mode="fill", fill_value=fill))(values, index)
