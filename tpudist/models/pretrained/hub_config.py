"""`config.json` of a pretrained model: the configuration of the transformer, or an error."""

from __future__ import annotations

import dataclasses
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from tpudist.models.pretrained.checkpoint_folder import CONFIG, read_json
from tpudist.models.pretrained.config_error import config_error
from tpudist.models.pretrained.hub_families import FAMILIES, Values
from tpudist.models.transformer_config import TransformerConfig

# A length of 0 is unknown; see `rotary_config`.
_COMMON: Values = {"rms_norm_eps": 1e-6, "max_position_embeddings": 0}
# Keys without an effect on a training step: names, the tokenizer, generation, initial values.
_WITHOUT_EFFECT = frozenset(
    (
        "_name_or_path",
        "architectures",
        "model_type",
        "auto_map",
        "transformers_version",
        "torch_dtype",
        "dtype",
    )
    + ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache")
    + ("task_specific_params", "output_router_logits", "n_ctx", "pretraining_tp")
    + ("summary_activation", "summary_first_dropout", "summary_proj_to_labels")
    + ("summary_type", "summary_use_proj")
)


class _Recorder(Values):
    """Values that record which keys were read."""

    def __init__(self, values: Values):
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default


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


def read_family(folder: str | PathLike[str]) -> str:
    """Returns the `model_type` of the model in a folder."""
    return read_json(Path(folder) / CONFIG, "its configuration")["model_type"]


def read_planned(folder: str | PathLike[str]) -> tuple[TransformerConfig, int | None, str]:
    """Returns a model to plan: its configuration, length, and a text about unused keys.

    Unlike `read_config` it accepts quantized weights, which are planned in bfloat16.

    Args:
        folder: Directory with a `config.json`.

    Raises:
        FileNotFoundError: If there is no `config.json`.
        ValueError: If the transformer does not support the model; the error names the key.
    """
    values = read_json(Path(folder) / CONFIG, "its configuration")
    is_quantized = values.pop("quantization_config", None) is not None
    config, unused = _parse(values)
    notes = []
    if is_quantized:
        config = dataclasses.replace(config, dtype="bfloat16")
        notes.append("quantization_config is not planned: weights are not quantized")
    elif not (values.get("dtype") or values.get("torch_dtype")):
        notes.append("there is no dtype, so float32 is planned: pass --dtype for another")
    if unused:
        notes.append(f"these keys are not mapped: {', '.join(unused)}")
    length = values.get("max_position_embeddings") or config.learned_positions
    return config, length, "; ".join(notes)


def parse_config(values: Values) -> TransformerConfig:
    """Returns the configuration of the transformer that a `config.json` describes.

    Raises:
        ValueError: If the transformer does not support the model.
    """
    return _parse(values)[0]


def _parse(values: Values) -> tuple[TransformerConfig, list[str]]:
    """Returns the configuration, and the keys that it does not contain."""
    name = values.get("model_type")
    if name not in FAMILIES:
        raise config_error("model_type", name, f"is not one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    written = {family.names.get(key, key): value for key, value in values.items()}
    # From the weakest to the strongest: common defaults, those of the family, the file.
    values = _Recorder(_COMMON | family.defaults | written)
    if name == "gpt2" and values["intermediate_size"] is None and values.get("hidden_size"):
        values["intermediate_size"] = 4 * values["hidden_size"]
    _check(values)
    fields = family.parse(values)
    heads = values["num_attention_heads"]
    is_tied = values["tie_word_embeddings"]
    fields = {
        "vocabulary": values["vocab_size"],
        "num_layers": values["num_hidden_layers"],
        "embed_dim": values["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": values.get("num_key_value_heads") or heads,
        "head_width": values.get("head_dim") or values["hidden_size"] // heads,
        "mlp_dim": values["intermediate_size"],
        "tied": is_tied,
        "output_scale": 1.0 if is_tied else None,
        "norm_epsilon": values["rms_norm_eps"],
        "dtype": parse_dtype(values),
    } | fields
    # A key without a value, such as a dropout of 0, asks for nothing.
    unused = [key for key in written if written[key] and key not in values.read | _WITHOUT_EFFECT]
    return TransformerConfig(**fields), sorted(unused)


def parse_dtype(values: Values) -> Literal["float32", "bfloat16"]:
    """Returns the dtype of the weights if the transformer can compute in it, else float32."""
    stored = values.get("dtype") or values.get("torch_dtype") or "float32"
    return stored if stored in ("float32", "bfloat16") else "float32"


def _check(values: Values) -> None:
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    for key in (*sizes, "intermediate_size"):
        if not isinstance(values.get(key), int) or values[key] < 1:
            raise config_error(key, values.get(key), "has an unknown size")
    if values.get("quantization_config") is not None:
        raise config_error(
            "quantization_config", values["quantization_config"], "has quantized weights"
        )
    if values.get("attention_bias") and values["model_type"] != "gpt_oss":
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
