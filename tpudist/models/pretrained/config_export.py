"""The `config.json` of a transformer, for other libraries to read."""

from __future__ import annotations

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
# Fields of `TransformerConfig` that do not change the results of a model.
_CHOICES = (
    *("dtype", "attention", "splash_block", "splash_backward_block", "remat", "loss_chunk"),
    *("pipeline_stages", "pipeline_microbatches"),
    *("expert_method", "expert_capacity", "expert_balance"),
)
# The transformer has no maximum length, but a `config.json` needs one. Libraries allocate nothing
# for it.
_MAX_LENGTH = 131_072


def make_config(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of a transformer with parameters of this dtype.

    It names the first family of `_ARCHITECTURES` that computes the same results.

    Raises:
        ValueError: If no family does.
    """
    differing: dict[str, tuple[str, ...]] = {}
    # In the order of the table, from the plainest: a plain transformer must become a Llama, which
    # most libraries support, and not a Gemma with every option off.
    for family in _ARCHITECTURES:
        # Reading the file again is the test: it must describe the same transformer.
        values = _make_values(config, family, dtype)
        try:
            different = differences(parse_config(values), config)
        except ValueError:  # the family does not support an option
            continue
        if not different:
            return values
        differing[family] = different
    # Never empty: a Llama with these sizes can always be read.
    family, fewest = min(differing.items(), key=lambda item: len(item[1]))
    raise ValueError(
        "No family of pretrained models computes the same as this transformer, so other libraries "
        f"could not read it. The nearest is {family!r}, which differs in {', '.join(fewest)}. "
        "Train a model without these differences, or save this one with tpudist.checkpoint. A "
        "loaded model can be saved like its folder: save_pretrained(model, folder, like=...)."
    )


def differences(a: TransformerConfig, b: TransformerConfig) -> tuple[str, ...]:
    """Returns the fields that differ and change the results of a model."""
    first, second = map(_normalize, (a, b))
    return tuple(name for name in first if first[name] != second[name])


def _normalize(config: TransformerConfig) -> dict[str, Any]:
    # Equal values for equal models: defaults become the numbers that they stand for.
    fields = {name: value for name, value in vars(config).items() if name not in _CHOICES}
    fields |= {"num_kv_heads": config.kv_heads, "head_width": config.head_dim}
    if fields["query_scale"] is None:
        fields["query_scale"] = config.head_dim**-0.5
    if config.tied and config.output_scale is None:
        fields["output_scale"] = config.embed_dim**-0.5
    if not config.tied:
        fields["output_scale"] = None
    if not config.num_experts:
        fields |= {"experts_per_token": None, "normalize_shares": None}
    if config.layers_with_window is not None and all(config.layers_with_window):
        fields["layers_with_window"] = None
    return fields


def _make_values(config: TransformerConfig, family: str, dtype: str) -> dict[str, Any]:
    layers = config.layers_with_window or (True,) * config.num_layers
    has_window = [config.attention_window is not None and windowed for windowed in layers]
    scaling = config.rotary_scaling
    length = scaling.original_length if scaling and scaling.kind == "dynamic" else _MAX_LENGTH
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
    # Gemma 2 and 3 renamed the key.
    key = "hidden_activation" if family in ("gemma2", "gemma3_text") else "hidden_act"
    values[key] = "gelu_pytorch_tanh" if family.startswith("gemma") else "silu"
    if family == "mistral":
        values["sliding_window"] = config.attention_window
    if family in ("qwen2", "qwen3", "gemma2", "gemma3_text"):
        values["sliding_window"] = config.attention_window
        types = ("full_attention", "sliding_attention")
        values["layer_types"] = [types[windowed] for windowed in has_window]
    if family in ("qwen2", "qwen3"):
        values["use_sliding_window"] = any(has_window)
        values["max_window_layers"] = config.num_layers
    if family in ("gemma2", "gemma3_text"):
        scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        # Files have the inverse square of the scale, as an integer. Rounding may change the scale;
        # then `differences` finds it, and the family is rejected.
        values["query_pre_attn_scalar"] = max(1, round(scale**-2))
        values["attn_logit_softcapping"] = config.attention_cap
        values["final_logit_softcapping"] = config.output_cap
    if family == "gemma3_text":
        values["rope_local_base_freq"] = config.local_rotary_base or config.rotary_base
    return values
