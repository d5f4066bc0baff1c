"""Families of pretrained models: the options that each `config.json` describes.

A missing key has the default of the package `transformers` (5.24), which differs between families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tpudist.models.pretrained.config_error import config_error
from tpudist.models.pretrained.rotary_config import parse_rotary, parse_scaling

Values = dict[str, Any]


def _parse_llama(values: Values) -> Values:
    base, scaling = parse_rotary(values)
    _check_silu(values)
    return {"rotary_base": base, "rotary_scaling": scaling}


def _parse_mistral(values: Values) -> Values:
    if values.get("layer_types") is not None:
        raise config_error("layer_types", values["layer_types"], "may have windows in some layers")
    return _parse_llama(values) | {"attention_window": values["sliding_window"]}


def _parse_qwen(values: Values) -> Values:
    window = values["sliding_window"] if values["use_sliding_window"] else None
    types = values.get("layer_types")
    if types is None:
        layers, first = values["num_hidden_layers"], values["max_window_layers"]
        # Before `layer_types` existed, the first `max_window_layers` layers had no window.
        has_window = [window is not None and i >= first for i in range(layers)]
    else:
        has_window = _parse_layer_types(types)
    return _parse_llama(values) | _window_fields(window, has_window)


def _parse_qwen2(values: Values) -> Values:
    return _parse_qwen(values) | {"biased": True}


def _parse_qwen3(values: Values) -> Values:
    return _parse_qwen(values) | {"norm_heads": True}


def _parse_gemma(values: Values) -> Values:
    activation = values.get("hidden_activation") or values.get("hidden_act")
    # Configurations of the first Gemma say "gelu" by mistake; libraries use the tanh there, too.
    supported = {"gelu_pytorch_tanh"} | ({"gelu"} if values["model_type"] == "gemma" else set())
    if activation not in supported:
        raise config_error(
            "hidden_activation", activation, "gates its MLPs with a different function"
        )
    fields: Values = {
        "gelu": True,
        "norm_offset": True,
        "embedding_scale": values["hidden_size"] ** 0.5,
    }
    # Gemma 3 has two rotations, which `_parse_gemma3` reads.
    if values["model_type"] != "gemma3_text":
        base, scaling = parse_rotary(values)
        fields |= {"rotary_base": base, "rotary_scaling": scaling}
    return fields


def _parse_gemma2(values: Values) -> Values:
    fields = _parse_gemma(values) | {
        "norm_outputs": True,
        "query_scale": values["query_pre_attn_scalar"] ** -0.5,
        "attention_cap": values["attn_logit_softcapping"],
        "output_cap": values["final_logit_softcapping"],
    }
    types, layers = values.get("layer_types"), values["num_hidden_layers"]
    has_window = [i % 2 == 0 for i in range(layers)] if types is None else _parse_layer_types(types)
    return fields | _window_fields(values["sliding_window"], has_window)


def _parse_gemma3(values: Values) -> Values:
    if values["attn_logit_softcapping"] is not None:
        cap = values["attn_logit_softcapping"]
        raise config_error("attn_logit_softcapping", cap, "has a bound that libraries omit")
    types, layers = values.get("layer_types"), values["num_hidden_layers"]
    # By default, every sixth layer of Gemma 3 attends to all tokens.
    global_every = values.get("sliding_window_pattern") or 6
    pattern = [(i + 1) % global_every != 0 for i in range(layers)]
    has_window = pattern if types is None else _parse_layer_types(types)
    fields = _parse_gemma(values) | {
        "norm_outputs": True,
        "norm_heads": True,
        "query_scale": values["query_pre_attn_scalar"] ** -0.5,
        "output_cap": values["final_logit_softcapping"],
    }
    fields |= _window_fields(values["sliding_window"], has_window)
    # Layers without a window have other positions than layers with one.
    parameters = values.get("rope_parameters") or {}
    full = parameters.get("full_attention") or values.get("rope_scaling") or {}
    fields["rotary_base"] = float(full.get("rope_theta") or values.get("rope_theta") or 1_000_000.0)
    fields["rotary_scaling"] = parse_scaling(full, "rope_scaling", values)
    sliding = parameters.get("sliding_attention") or {}
    if parse_scaling(sliding, "rope_parameters", values) is not None:
        raise config_error(
            "rope_parameters", parameters, "stretches positions in layers with a window"
        )
    if any(has_window):
        base = sliding.get("rope_theta") or values.get("rope_local_base_freq") or 10_000.0
        fields["local_rotary_base"] = float(base)
    return fields


def _check_silu(values: Values) -> None:
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise config_error(
            "hidden_act", values["hidden_act"], "gates its MLPs with a different function"
        )


def _parse_layer_types(types: list[str]) -> list[bool]:
    """Returns whether each layer has a window."""
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise config_error("layer_types", types, f"has layers of type {kind!r}")
    return [kind == "sliding_attention" for kind in types]


def _window_fields(window: int | None, has_window: list[bool]) -> Values:
    if not any(has_window):
        return {}
    if window is None:
        raise config_error("sliding_window", None, "has layers with a window of unknown size")
    return {
        "attention_window": window,
        "layers_with_window": None if all(has_window) else tuple(has_window),
    }


def _parse_experts(values: Values, num_experts: str, mlp_dim: str) -> Values:
    """Returns the fields of experts, so that no token is dropped, as in the package `transformers`.

    Args:
        values: `config.json`.
        num_experts: Key of the number of experts.
        mlp_dim: Key of the hidden width of each expert.
    """
    experts, choices = values[num_experts], values["num_experts_per_tok"]
    for key, value in ((num_experts, experts), ("num_experts_per_tok", choices)):
        if not value:
            raise config_error(key, value, "has no experts")
    return {
        "num_experts": experts,
        "experts_per_token": choices,
        "mlp_dim": values[mlp_dim],
        "expert_method": "grouped",
        "expert_capacity": experts / choices,
    }


def _parse_mixtral(values: Values) -> Values:
    experts = _parse_experts(values, "num_local_experts", "intermediate_size")
    return _parse_llama(values) | experts | {"attention_window": values["sliding_window"]}


def _parse_qwen3_moe(values: Values) -> Values:
    if values["mlp_only_layers"] or values["decoder_sparse_step"] != 1:
        key = "mlp_only_layers" if values["mlp_only_layers"] else "decoder_sparse_step"
        raise config_error(key, values[key], "has layers without experts")
    experts = _parse_experts(values, "num_experts", "moe_intermediate_size")
    return _parse_qwen3(values) | experts | {"normalize_shares": values["norm_topk_prob"]}


def _parse_gpt_oss(values: Values) -> Values:
    types, layers = values.get("layer_types"), values["num_hidden_layers"]
    has_window = [i % 2 == 0 for i in range(layers)] if types is None else _parse_layer_types(types)
    return (
        _parse_llama(values)
        | _parse_experts(values, "num_local_experts", "intermediate_size")
        | _window_fields(values["sliding_window"], has_window)
        | {
            "biased": values["attention_bias"],
            "biased_outputs": values["attention_bias"],
            "biased_mlp": True,
            "attention_sinks": True,
            "swiglu_limit": values["swiglu_limit"],
        }
    )


def _parse_phi3(values: Values) -> Values:
    key = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    parameters = values.get(key) or {}
    part = parameters.get("partial_rotary_factor", values["partial_rotary_factor"])
    width = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    _check_silu(values)
    return {
        "rotary_base": float(parameters.get("rope_theta") or values.get("rope_theta") or 10_000.0),
        "rotary_scaling": parse_scaling(parameters, key, values, partial=True),
        "rotary_width": None if part == 1 else int(width * part),
        "attention_window": values["sliding_window"],
    }


def _parse_olmo2(values: Values) -> Values:
    norms = {"norm_inputs": False, "norm_outputs": True, "norm_projections": True}
    return _parse_llama(values) | norms


def _parse_gpt2(values: Values) -> Values:
    if values["hidden_act"] not in ("gelu_new", "gelu_pytorch_tanh"):
        raise config_error("activation_function", values["hidden_act"], "has another activation")
    for key, usual in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if values.get(key, usual) != usual:
            raise config_error(key, values[key], "computes attention differently")
    return {
        "learned_positions": values["max_position_embeddings"],
        "norm": "layer",
        "gated": False,
        "biased": True,
        "biased_outputs": True,
        "biased_mlp": True,
    }


_UNTIED: Values = {"tie_word_embeddings": False}
_TIED: Values = {"tie_word_embeddings": True}
_QWEN: Values = _UNTIED | {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA2: Values = _TIED | {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}


@dataclass(frozen=True)
class Family:
    """Facts about a `model_type`.

    Attributes:
        defaults: Values of missing keys.
        parse: Called with the values; returns the fields of the configuration that only some
            families have.
        names: Names of keys in this family, if they differ from the usual ones.
    """

    defaults: Values
    parse: Callable[[Values], Values]
    names: dict[str, str] = field(default_factory=dict)


_MIXTRAL: Values = _UNTIED | {
    "num_key_value_heads": 8,
    "sliding_window": None,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN3_MOE: Values = _QWEN | {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_GPT_OSS: Values = _UNTIED | {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
_PHI3: Values = _UNTIED | {
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
}
_GPT2: Values = _TIED | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "hidden_act": "gelu_new",
    "intermediate_size": None,
}
_NAMES_OF_GPT2 = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
FAMILIES: dict[str, Family] = {
    "llama": Family(_UNTIED, _parse_llama),
    "mistral": Family(_UNTIED | {"num_key_value_heads": 8, "sliding_window": 4096}, _parse_mistral),
    "qwen2": Family(_QWEN, _parse_qwen2),
    "qwen3": Family(_QWEN | {"head_dim": 128}, _parse_qwen3),
    "gemma": Family(
        _TIED | {"num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
        _parse_gemma,
    ),
    "gemma2": Family(
        _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _parse_gemma2,
    ),
    "gemma3_text": Family(
        _GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        _parse_gemma3,
    ),
    "mixtral": Family(_MIXTRAL, _parse_mixtral),
    # Newer files have the name of Mixtral.
    "qwen3_moe": Family(_QWEN3_MOE, _parse_qwen3_moe, {"num_local_experts": "num_experts"}),
    "gpt_oss": Family(_GPT_OSS, _parse_gpt_oss),
    "phi3": Family(_PHI3, _parse_phi3),
    "olmo2": Family(_UNTIED | {"rms_norm_eps": 1e-5}, _parse_olmo2),
    "gpt2": Family(_GPT2, _parse_gpt2, _NAMES_OF_GPT2),
}
"""Facts by `model_type`."""
