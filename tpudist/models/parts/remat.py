"""Rematerialization: the tensors of a block that the backward pass keeps, recomputes or offloads.

A block of the transformer names its tensors (`NAMES`), and a policy decides about each. `POLICIES`
lists the named policies; `minimal` and its variants keep the same tensors as in MaxText. Other
policies are lists such as "save:query,key+offload:mlp_in"; tensors that a list does not mention are
recomputed.

Saved bytes per token and layer are the widths of the named tensors. Recomputing costs the products
that made them. Offloading costs the transfers to the host and back; XLA overlaps a part of them
with other work, and a plan reports the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

NAMES = (
    "layer_input",
    "query",
    "key",
    "value",
    "attention",
    "attention_out",
    "mlp_in",
    "mlp_out",
)
"""Tensors of a block, in order. `attention` is the output of the heads, before its projection."""

# Outputs of the projections. MaxText calls them query_proj, key_proj, value_proj, out_proj, mlpwi
# and mlpwo, and saves (`minimal`) or offloads (`minimal_offloaded`) them: `minimal_policy` in
# maxtext/layers/decoders.py and `get_save_and_offload_names` in maxtext/utils/maxtext_utils.py. Its
# `context` is `attention` here. The scan keeps the input of a layer anyway.
_PRODUCTS = ("query", "key", "value", "attention_out", "mlp_in", "mlp_out")


@dataclass(frozen=True)
class Policy:
    """Tensors of a block that are saved or offloaded between its forward and its backward pass."""

    saved: tuple[str, ...] = ()
    """Names of tensors that stay in the memory of the device."""
    offloaded: tuple[str, ...] = ()
    """Names of tensors that move to the memory of the host and back."""
    everything: bool = False
    """Whether to save all tensors that the backward pass uses, so nothing is recomputed."""
    dots: bool = False
    """Whether to save the results of all matrix products, with or without a name."""


POLICIES: dict[str, Policy] = {
    "none": Policy(everything=True),
    "full": Policy(),
    "dots": Policy(dots=True),
    "minimal": Policy(saved=_PRODUCTS),
    "minimal_with_context": Policy(saved=(*_PRODUCTS, "attention")),
    "save_qkv": Policy(saved=("query", "key", "value")),
    "save_attention": Policy(saved=("attention",)),
    "save_projections": Policy(saved=("query", "key", "value", "attention_out")),
    "save_mlp": Policy(saved=("mlp_in",)),
    "offload_qkv": Policy(offloaded=("query", "key", "value")),
    "offload_projections": Policy(
        offloaded=("layer_input", "query", "key", "value", "attention_out")
    ),
    "minimal_offloaded": Policy(offloaded=_PRODUCTS),
}


def parse(text: str) -> Policy:
    """Returns a policy by its name or its list of tensors.

    Raises:
        ValueError: If `text` is neither, or lists an unknown tensor, or lists a tensor twice.
    """
    if text in POLICIES:
        return POLICIES[text]
    chosen: dict[str, tuple[str, ...]] = {"save": (), "offload": ()}
    for part in text.split("+"):
        verb, colon, names = part.partition(":")
        if verb not in chosen or not colon:
            raise ValueError(
                f"remat={text!r} is not a policy. Use one of {', '.join(POLICIES)}, or list "
                'tensors, as in "save:query,key+offload:mlp_in".'
            )
        # A verb may occur twice; its tensors add up.
        chosen[verb] += tuple(name.strip() for name in names.split(","))
    mentioned = chosen["save"] + chosen["offload"]
    unknown = [name for name in mentioned if name not in NAMES]
    if unknown:
        raise ValueError(
            f"remat={text!r} mentions {', '.join(map(repr, unknown))}, which no block has. The "
            f"tensors of a block are {', '.join(NAMES)}."
        )
    twice = [name for name in NAMES if mentioned.count(name) > 1]
    if twice:
        raise ValueError(
            f"remat={text!r} mentions {', '.join(twice)} twice. A tensor is either saved or "
            f"offloaded: mention it once."
        )
    return Policy(chosen["save"], chosen["offload"])


def apply(block: Callable[..., Any], text: str, *, platform: str) -> Callable[..., Any]:
    """Returns `block` with the rematerialization of a policy.

    Args:
        block: Function that a scan applies.
        text: Policy; see `parse`.
        platform: Platform of the devices that will run it.

    Raises:
        ValueError: If the policy offloads, and JAX does not support that on `platform`.
    """
    policy = parse(text)
    if policy.everything:
        return block
    if policy.offloaded and platform not in ("tpu", "gpu", "cpu"):
        raise ValueError(
            f"remat={text!r} moves {', '.join(policy.offloaded)} to host memory, which JAX does "
            f"not support on platform {platform!r}. Save them instead, or recompute them."
        )
    # The scan already keeps XLA from merging the second computation with the first.
    return jax.checkpoint(block, policy=_rule(policy), prevent_cse=False)


def _rule(policy: Policy) -> Callable[..., Any] | None:
    # `everything` never gets here, and None recomputes all tensors: the default of
    # `jax.checkpoint`.
    if policy.dots:
        return jax.checkpoint_policies.checkpoint_dots
    if policy.offloaded:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=policy.saved,
            names_which_can_be_offloaded=policy.offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint_policies.save_only_these_names(*policy.saved) if policy.saved else None
