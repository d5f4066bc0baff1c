"""What a backward pass keeps of a block's forward pass, recomputes, or moves to the host.

A transformer's block gives names to its tensors (`NAMES`); a policy says what becomes of each.
`POLICIES` lists those with a name of their own. Any other is written out, as in
"save:query,key+offload:mlp_in"; what it does not mention is recomputed.

Kept bytes per token and layer are the widths of the named tensors; recomputing costs the products
that made them. Host memory costs the way there and back, of which XLA overlaps a part with
other work: a plan says how much is waited for.
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
"""The tensors of a block, in order. `attention` is what the heads gather, before its projection."""


@dataclass(frozen=True)
class Policy:
    """What becomes of a block's tensors between its forward and its backward pass."""

    saved: tuple[str, ...] = ()
    """Names of tensors that stay in the device's memory."""
    offloaded: tuple[str, ...] = ()
    """Names of tensors that are moved to the host's memory and back."""
    everything: bool = False
    """Keep whatever the backward pass can use: no recomputation at all."""
    dots: bool = False
    """Keep the results of all matrix products, named or not."""


POLICIES: dict[str, Policy] = {
    "none": Policy(everything=True),
    "full": Policy(),
    "dots": Policy(dots=True),
    "minimal": Policy(saved=NAMES[1:]),
    "save_qkv": Policy(saved=("query", "key", "value")),
    "save_attention": Policy(saved=("attention",)),
    "save_projections": Policy(saved=("query", "key", "value", "attention_out")),
    "save_mlp": Policy(saved=("mlp_in",)),
    "offload_qkv": Policy(offloaded=("query", "key", "value")),
    "offload_projections": Policy(
        offloaded=("layer_input", "query", "key", "value", "attention_out")
    ),
    "minimal_offloaded": Policy(offloaded=NAMES),
}


def parse(text: str) -> Policy:
    """The policy called `text`, or written out in it.

    Raises:
        ValueError: Neither a known policy nor one written out, or it mentions a tensor twice or one
            that blocks do not have.
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
    """`block`, remembering what the policy called `text` says.

    Args:
        block: Applied by a scan, which keeps XLA from undoing the recomputation.
        text: See `parse`.
        platform: Of the devices it will run on.

    Raises:
        ValueError: The policy offloads, and `platform` has no host memory to offload to.
    """
    policy = parse(text)
    if policy.everything:
        return block
    if policy.offloaded and platform not in ("tpu", "gpu", "cpu"):
        raise ValueError(
            f"remat={text!r} moves {', '.join(policy.offloaded)} to host memory, which JAX does "
            f"not support on platform {platform!r}. Save them instead, or recompute them."
        )
    return jax.checkpoint(block, policy=_rule(policy), prevent_cse=False)


def _rule(policy: Policy) -> Any:
    """The policy as JAX takes it."""
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
