"""A `config.json` for a transformer of one's own, for other libraries to read."""

from __future__ import annotations

import dataclasses
from typing import Any

from tpudist.models.pretrained.hub_config import parse_config
from tpudist.models.pretrained.rotary_config import write_scaling
from tpudist.models.transformer_config import TransformerConfig

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
# What says how a model computes, and not what.
_CHOICES = ("dtype", "attention", "splash_block", "splash_backward_block", "remat", "loss_chunk")
_CHOICES += ("pipeline_stages", "pipeline_microbatches", "experts_per_token", "expert_capacity")
_CHOICES += ("expert_balance",)
_LONGEST = 131_072  # the transformer takes any; other libraries reserve nothing for it


def make_config(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` of a transformer whose parameters have this dtype.

    Of the families that other libraries know, the first that computes the same.

    Raises:
        ValueError: None does.
    """
    differing: dict[str, tuple[str, ...]] = {}
    for family in _ARCHITECTURES:
        values = _write(config, family, dtype)
        try:
            different = differences(parse_config(values), config)
        except ValueError:  # of the family, which has no such thing
            continue
        if not different:
            return values
        differing[family] = different
    family, least = min(differing.items(), key=lambda item: len(item[1]))
    raise ValueError(
        "No family of pretrained models computes the same as this transformer, so other libraries "
        f"could not read it. The nearest is {family!r}, which differs in {', '.join(least)}. Train "
        "a model without these differences, or save this one with tpudist.checkpoint."
    )


def differences(a: TransformerConfig, b: TransformerConfig) -> tuple[str, ...]:
    """The fields in which two configurations differ that say what a model computes."""
    first, second = map(_essence, (a, b))
    return tuple(name for name in first if first[name] != second[name])


def _essence(config: TransformerConfig) -> dict[str, Any]:
    found = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in _CHOICES
    }
    found |= {"num_kv_heads": config.kv_heads, "head_width": config.head_dim}
    if found["query_scale"] is None:
        found["query_scale"] = config.head_dim**-0.5
    if config.tied and config.output_scale is None:
        found["output_scale"] = config.embed_dim**-0.5
    if not config.tied:
        found["output_scale"] = None
    if config.layers_with_window is not None and all(config.layers_with_window):
        found["layers_with_window"] = None
    return found


def _write(config: TransformerConfig, family: str, dtype: str) -> dict[str, Any]:
    layers = config.layers_with_window or (True,) * config.num_layers
    local = [config.attention_window is not None and windowed for windowed in layers]
    scaling = config.rotary_scaling
    length = scaling.original_length if scaling and scaling.kind == "dynamic" else _LONGEST
    values: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocabulary,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "attention_bias": False,
        "tie_word_embeddings": config.tied,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": write_scaling(scaling),
        "max_position_embeddings": length,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    activation = "hidden_act" if family in ("llama", "mistral", "qwen2", "qwen3", "gemma") else None
    is_gemma = family.startswith("gemma")
    values[activation or "hidden_activation"] = "gelu_pytorch_tanh" if is_gemma else "silu"
    if family == "mistral":
        values["sliding_window"] = config.attention_window
    if family in ("qwen2", "qwen3", "gemma2", "gemma3_text"):
        values["sliding_window"] = config.attention_window
        kinds = ("full_attention", "sliding_attention")
        values["layer_types"] = [kinds[windowed] for windowed in local]
    if family in ("qwen2", "qwen3"):
        values["use_sliding_window"] = any(local)
        values["max_window_layers"] = config.num_layers
    if family in ("gemma2", "gemma3_text"):
        scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        values["query_pre_attn_scalar"] = max(1, round(scale**-2))
        values["attn_logit_softcapping"] = config.attention_cap
        values["final_logit_softcapping"] = config.output_cap
    if family == "gemma3_text":
        values["rope_local_base_freq"] = config.local_rotary_base or config.rotary_base
    return values
