"""The reference transformer in well-known sizes, for plans and benchmarks.

A preset has the shapes of a published model, not its weights. The scaling of rotary positions
(Llama 3.1) and the window of attention (Mistral 7B) change no shape, and are left out.
"""

from __future__ import annotations

import dataclasses

from flax import nnx

from tpudist.models.transformer import Transformer
from tpudist.models.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Preset:
    """Size of a model, and of its usual training batches.

    Attributes:
        config: Configuration of the model.
        length: Tokens of a sequence.
        batch_per_chip: Sequences per chip, a default to start from.
        source: Origin of the sizes of the model.
    """

    config: TransformerConfig
    length: int
    batch_per_chip: int
    source: str


_LLAMA_8B = TransformerConfig(
    vocabulary=128_256,
    num_layers=32,
    embed_dim=4096,
    num_heads=32,
    num_kv_heads=8,
    mlp_dim=14_336,
    rotary_base=500_000.0,
    dtype="bfloat16",
    remat="full",
    loss_chunk=1024,
)
# Mistral 7B has the sizes of Llama 8B, except for the vocabulary; Mixtral has its sizes per expert.
_MISTRAL_7B = dataclasses.replace(_LLAMA_8B, vocabulary=32_000, rotary_base=10_000.0)
_MAXTEXT_16B = TransformerConfig(
    vocabulary=32_000,
    num_layers=32,
    embed_dim=4096,
    num_heads=64,
    head_width=128,
    mlp_dim=28_672,
    dtype="bfloat16",
    remat="full",
    loss_chunk=512,
)

PRESETS: dict[str, Preset] = {
    "tiny": Preset(TransformerConfig(dtype="bfloat16"), 128, 16, "the default of scripts/train.py"),
    "llama-3.1-8b": Preset(
        _LLAMA_8B, 8192, 3, "huggingface.co/meta-llama/Llama-3.1-8B, config.json"
    ),
    "llama-3.1-70b": Preset(
        dataclasses.replace(_LLAMA_8B, num_layers=80, embed_dim=8192, num_heads=64, mlp_dim=28_672),
        8192,
        2,
        "huggingface.co/meta-llama/Llama-3.1-70B, config.json",
    ),
    "mistral-7b": Preset(
        _MISTRAL_7B, 8192, 4, "huggingface.co/mistralai/Mistral-7B-v0.1, config.json"
    ),
    "mixtral-8x7b": Preset(
        dataclasses.replace(
            _MISTRAL_7B, num_experts=8, experts_per_token=2, rotary_base=1_000_000.0
        ),
        4096,
        2,
        "huggingface.co/mistralai/Mixtral-8x7B-v0.1, config.json",
    ),
    "dense-16b": Preset(_MAXTEXT_16B, 2048, 6, "AI-Hypercomputer/maxtext, configs/tpu/v5e/16b.sh"),
    "dense-32b": Preset(
        dataclasses.replace(_MAXTEXT_16B, embed_dim=8192),
        2048,
        4,
        "AI-Hypercomputer/maxtext, configs/tpu/v5e/32b.sh",
    ),
}


def make_transformer(config: TransformerConfig, seed: int = 0) -> Transformer:
    """Returns the model with random parameters."""
    return Transformer(config, rngs=nnx.Rngs(seed))
