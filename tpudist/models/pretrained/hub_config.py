"""`config.json` of a pretrained model: the transformer that it describes, or why there is none."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from tpudist.models.pretrained.checkpoint_folder import CONFIG, read_json
from tpudist.models.transformer_config import TransformerConfig


def read_config(folder: str | PathLike[str]) -> TransformerConfig:
    """The transformer whose weights a folder holds, by its `config.json`; weights are not read.

    Args:
        folder: Of a pretrained model, on this machine.

    Raises:
        FileNotFoundError: There is no `config.json`.
        ValueError: It describes a model that the transformer cannot be, by the key that says so.
    """
    return parse_config(read_json(Path(folder) / CONFIG, "its configuration"))


def parse_config(values: dict[str, Any]) -> TransformerConfig:
    """The transformer that a `config.json` describes.

    Raises:
        ValueError: The transformer cannot be it.
    """
    heads = values["num_attention_heads"]
    return TransformerConfig(
        vocabulary=values["vocab_size"],
        num_layers=values["num_hidden_layers"],
        embed_dim=values["hidden_size"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_width=values.get("head_dim") or values["hidden_size"] // heads,
        mlp_dim=values["intermediate_size"],
        tied=values.get("tie_word_embeddings", False),
        output_scale=1.0,
        norm_epsilon=values.get("rms_norm_eps", 1e-6),
        rotary_base=_rotary_base(values),
        dtype=_dtype(values),
    )


def _dtype(values: dict[str, Any]) -> Any:
    stored = values.get("dtype") or values.get("torch_dtype") or "float32"
    return stored if stored in ("float32", "bfloat16") else "float32"


def _rotary_base(values: dict[str, Any]) -> float:
    parameters = values.get("rope_parameters") or {}
    return float(parameters.get("rope_theta") or values.get("rope_theta") or 10_000.0)


def make_config(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """The `config.json` of a transformer whose parameters have this dtype.

    Raises:
        ValueError: There is no model outside that computes what the transformer does.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": None,
        "max_position_embeddings": 131_072,
        "torch_dtype": dtype,
    }
