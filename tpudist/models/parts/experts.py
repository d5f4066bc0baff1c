"""A mixture of experts instead of the MLP of a transformer: few of many experts compute each token.

A router scores the experts for each token. The best `experts_per_token` of them compute it, and
their outputs are added with weights, which usually sum to 1. There are two methods:

- `dispatch`: each expert has room for `expert_capacity` times its equal share of the tokens of a
  row, and one einsum computes all slots. A choice whose expert is full is dropped and counted; the
  token keeps the residual stream and the outputs of its other experts.
- `grouped`: grouped products (`expert_groups`) without slots. Only if a mesh axis splits the
  experts, each device of it has slots: `expert_capacity` times its share of the tokens of a row.

Rows are routed one by one, and tokens get slots in order of position. So results do not depend on
how rows are spread over devices, and no token depends on later tokens.

Logical names: the `expert` dim of the weights is split over the mesh axis `expert`, which splits
the batch as well. An all-to-all over that axis moves tokens to their experts and back.

Sources: GShard (arXiv 2006.16668) for capacity, Mixtral (2401.04088) for the weights, DeepSeek-V3
(2412.19437, section 2.1.2) for a balance loss of each row.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tpudist.models.parts import expert_groups
from tpudist.models.parts.activation import activate
from tpudist.models.parts.logical import constrain
from tpudist.models.parts.row_moves import move, take


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

    @property
    def expert_method(self) -> Literal["dispatch", "grouped"]:
        """How experts compute their tokens."""
        ...

    @property
    def normalize_shares(self) -> bool:
        """Whether the weights of the outputs of a token sum to 1."""
        ...

    @property
    def swiglu_limit(self) -> float | None:
        """Bound of the inputs of the activation; see `activate`."""
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


def capacity(length: int, config: ExpertSettings, num_groups: int | None = None) -> int:
    """Returns the number of slots of each group of experts for a row of `length` tokens.

    Args:
        length: Tokens of a row.
        config: Number of experts, choices per token, and capacity.
        num_groups: Number of equal groups of experts; by default each expert is one.
    """
    num_groups = num_groups or config.num_experts
    share = length * config.experts_per_token / num_groups
    # A token chooses an expert at most once, so more slots than that would stay empty.
    most = length * min(config.experts_per_token, config.num_experts // num_groups)
    # Rounded up, so that a capacity of 1 has a slot for every choice of evenly spread tokens; but
    # 1.1 * 50 is 55.00000000000001 in floating point.
    return min(most, math.ceil(round(config.expert_capacity * share, 6)))


def mlp(
    x: jax.Array, weights: dict[str, jax.Array], config: ExpertSettings
) -> tuple[jax.Array, Routing]:
    """Returns the output of the experts `[batch, length, embed]`, and the spread of the tokens.

    Args:
        x: `[batch, length, embed]`.
        weights: `router` `[embed, expert]`, `mlp_in` `[expert, embed, branches, mlp]`, `mlp_out`
            `[expert, mlp, embed]`, and perhaps biases with the same dims, except the first of
            those that a product contracts.
        config: Number of experts, choices per token, method and capacity.

    Cost: with an axis `expert`, two all-to-alls over it, of the tokens in slots and of their
    outputs. With grouped products, also see `expert_groups.apply`.
    """
    is_grouped = config.expert_method == "grouped"
    num_groups = expert_groups.num_groups(config.num_experts) if is_grouped else None
    if num_groups != 1:  # slots are for complete rows
        x = constrain(x, "batch", None, None)
    scores = x.astype(jnp.float32) @ weights["router"].astype(jnp.float32)
    if (bias := weights.get("router_bias")) is not None:
        scores += bias.astype(jnp.float32)
    probabilities = jax.nn.softmax(scores)
    shares, chosen = choose(probabilities, config.experts_per_token, config.normalize_shares)
    if num_groups == 1:
        rows = (x[:, None], chosen[:, None], shares[:, None])
        out = expert_groups.apply(*rows, weights, config.swiglu_limit)[:, 0]
        kept = jnp.ones_like(shares)
    else:
        out, kept = _send(x, shares, chosen, weights, config, num_groups)
    if (bias := weights.get("mlp_out_bias")) is not None:
        one_hot = jax.nn.one_hot(chosen, config.num_experts, dtype=x.dtype)
        share_of_expert = jnp.einsum("blks,blk->bls", one_hot, (shares * kept).astype(x.dtype))
        with jax.named_scope("in_place_of_scatter"):  # planner/model_flops.py does not count it
            out += jnp.einsum("bls,se->ble", share_of_expert, bias.astype(x.dtype))
    routing = Routing(imbalance(probabilities, chosen), 1 - kept.mean(axis=(1, 2)))
    return out, routing


def _send(
    x: jax.Array,
    shares: jax.Array,
    chosen: jax.Array,
    weights: dict[str, jax.Array],
    config: ExpertSettings,
    num_groups: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Sends tokens to slots of groups of experts; returns the weighted sums of their outputs.

    The second result is 1 for each choice that had a slot, and 0 for the others.
    """
    batch, length, embed = x.shape
    num_choices = config.experts_per_token
    slots = capacity(length, config, num_groups)
    groups = num_groups or config.num_experts
    per_group = config.num_experts // groups
    slot_of_choice, choice_of_slot = assign((chosen // per_group).reshape(batch, -1), groups, slots)
    # The choices of a token are neighbors. An empty slot has the number of choices, and so the
    # number of tokens here, which `take` reads as none.
    token_of_slot = choice_of_slot // num_choices
    sent = move(x, token_of_slot, slot_of_choice.reshape(batch, length, num_choices))
    sent = _to_groups(sent.reshape(batch, groups, slots, embed))
    if num_groups is None:
        out = _apply(sent, weights, config.swiglu_limit)
    else:
        flat = (chosen % per_group).reshape(batch, -1)
        expert_of_slot = take(flat, choice_of_slot, per_group).reshape(batch, groups, slots, 1)
        alone = jnp.ones_like(expert_of_slot, shares.dtype)
        numbers = _to_groups(expert_of_slot)
        out = expert_groups.apply(sent, numbers, alone, weights, config.swiglu_limit)
    out = constrain(out, "expert_batch", "expert", "sequence", None)
    out = constrain(out, "batch", None, None, None)
    received = move(out.reshape(batch, -1, embed), slot_of_choice, choice_of_slot[..., None])
    received = received.reshape(batch, length, num_choices, embed)
    y = jnp.einsum("blke,blk->ble", received, shares.astype(x.dtype))
    kept = (slot_of_choice < groups * slots).reshape(shares.shape).astype(jnp.float32)
    return constrain(y, "batch", None, None), kept


def _to_groups(x: jax.Array) -> jax.Array:
    """Moves slots `[batch, group, slot, ...]` of rows to the devices of their groups."""
    # These two constraints, and the two for the way back, make XLA emit the all-to-alls: the same
    # array, first split over its rows, then over its groups.
    x = constrain(x, "batch", None, None, None)
    return constrain(x, "expert_batch", "expert", "sequence", None)


def choose(
    probabilities: jax.Array, num_choices: int, normalize: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Returns the shares and the numbers of the likeliest experts of each token.

    Args:
        probabilities: `[..., expert]`, positive.
        num_choices: Number of experts per token.
        normalize: Whether the shares of a token sum to 1; otherwise they are the probabilities.

    Returns:
        Shares and experts `[..., choice]`, the likeliest first, and the first of equal ones.
    """
    # The choice has no gradient; the shares below carry it to the router.
    chosen = jax.lax.top_k(jax.lax.stop_gradient(probabilities), num_choices)[1]
    # A product with one-hot rows, because the gradient of indexing would be a scatter.
    one_hot = jax.nn.one_hot(chosen, probabilities.shape[-1], dtype=probabilities.dtype)
    likeliest = jnp.sum(one_hot * probabilities[..., None, :], axis=-1)
    if normalize:
        likeliest = likeliest / likeliest.sum(axis=-1, keepdims=True)
    return likeliest, chosen


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
    choice_of_slot = take(in_order, sorted_index.reshape(len(chosen), -1), num_choices)
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


def _apply(x: jax.Array, weights: dict[str, jax.Array], limit: float | None) -> jax.Array:
    """Applies the MLP of each expert to its slots `[batch, expert, slot, embed]`."""
    # In these products: x batch, s expert, c slot, e embed, f branch, m mlp.
    into, back = weights["mlp_in"].astype(x.dtype), weights["mlp_out"].astype(x.dtype)
    hidden = jnp.einsum("xsce,sefm->xscfm", x, into)
    if (bias := weights.get("mlp_in_bias")) is not None:
        hidden += bias.astype(x.dtype)[:, None]
    hidden = constrain(hidden, "expert_batch", "expert", "sequence", None, "mlp")
    hidden = checkpoint_name(hidden, "mlp_in")
    branches = (hidden[..., branch, :] for branch in range(hidden.shape[3]))
    return jnp.einsum("xscm,sme->xsce", activate(*branches, limit=limit), back)
