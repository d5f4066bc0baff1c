"""`config.json` of a pretrained model: the configuration of the transformer, or an error.

A missing key has the default of the package `transformers` (5.24), which differs between families.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from tpudist.models.pretrained.checkpoint_folder import CONFIG, read_json
from tpudist.models.pretrained.config_error import config_error
from tpudist.models.pretrained.rotary_config import parse_rotary, parse_scaling
from tpudist.models.transformer_config import TransformerConfig

Values = dict[str, Any]


def read_config(folder: str | PathLike[str]) -> TransformerConfig:
    """Returns the configuration of the transformer in a folder; weights are not read.

    Its `dtype` is the dtype of the weights if the transformer can compute in it, else float32.

    Args:
        folder: Directory of a pretrained model on this machine.

    Raises:
        FileNotFoundError: If there is no `config.json`.
        ValueError: If the transformer does not support the model; the error names the key.
    """
    return parse_config(read_json(Path(folder) / CONFIG, "its configuration"))


def read_length(folder: str | PathLike[str]) -> int | None:
    """Returns the maximum tokens of a sequence of the model in a folder, if it is known."""
    values = read_json(Path(folder) / CONFIG, "its configuration")
    return values.get("max_position_embeddings")


def parse_config(values: Values) -> TransformerConfig:
    """Returns the configuration of the transformer that a `config.json` describes.

    Raises:
        ValueError: If the transformer does not support the model.
    """
    family = values.get("model_type")
    if family not in FAMILIES:
        raise config_error("model_type", family, f"is not one of {', '.join(FAMILIES)}")
    defaults, parse = FAMILIES[family]
    # From the weakest to the strongest: common defaults, those of the family, the file.
    values = _COMMON | defaults | values
    _check(values)
    fields = parse(values)
    heads = values["num_attention_heads"]
    return TransformerConfig(
        vocabulary=values["vocab_size"],
        num_layers=values["num_hidden_layers"],
        embed_dim=values["hidden_size"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_width=values.get("head_dim") or values["hidden_size"] // heads,
        mlp_dim=values["intermediate_size"],
        tied=values["tie_word_embeddings"],
        output_scale=1.0 if values["tie_word_embeddings"] else None,
        norm_epsilon=values["rms_norm_eps"],
        dtype=parse_dtype(values),
        **fields,
    )


def parse_dtype(values: Values) -> Literal["float32", "bfloat16"]:
    """Returns the dtype of the weights if the transformer can compute in it, else float32."""
    stored = values.get("dtype") or values.get("torch_dtype") or "float32"
    return stored if stored in ("float32", "bfloat16") else "float32"


def _check(values: Values) -> None:
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    for key in (*sizes, "intermediate_size"):
        if not isinstance(values.get(key), int):
            raise config_error(key, values.get(key), "has an unknown size")
    if values.get("quantization_config") is not None:
        raise config_error(
            "quantization_config", values["quantization_config"], "has quantized weights"
        )
    if values.get("attention_bias"):
        raise config_error("attention_bias", True, "adds a bias after attention")
    if values.get("mlp_bias"):
        raise config_error("mlp_bias", True, "adds biases in its MLPs")
    if values.get("use_bidirectional_attention"):
        raise config_error(
            "use_bidirectional_attention", True, "attends to the tokens after a token"
        )
    if values.get("adapter_config") is not None:
        raise config_error(
            "adapter_config", values["adapter_config"], "has adapters in addition to its weights"
        )


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


# A length of 0 is unknown; see `rotary_config`.
_COMMON: Values = {"rms_norm_eps": 1e-6, "max_position_embeddings": 0}
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
FAMILIES: dict[str, tuple[Values, Callable[[Values], Values]]] = {
    "llama": (_UNTIED, _parse_llama),
    "mistral": (_UNTIED | {"num_key_value_heads": 8, "sliding_window": 4096}, _parse_mistral),
    "qwen2": (_QWEN, _parse_qwen2),
    "qwen3": (_QWEN | {"head_dim": 128}, _parse_qwen3),
    "gemma": (
        _TIED | {"num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
        _parse_gemma,
    ),
    "gemma2": (
        _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        _parse_gemma2,
    ),
    "gemma3_text": (
        _GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        _parse_gemma3,
    ),
}
"""For each `model_type`: values of missing keys, and the function that returns its own fields."""
