"""Files of MaxText's configuration: values of keys, and which keys a reader did not use.

Keys of the first file are MaxText's defaults, so of these only some are reported: those that change
a step if they have another value (`_NEUTRAL`). Of the other keys, those without an effect on a step
(`_WITHOUT_EFFECT`) are not reported.

Source: AI-Hypercomputer/maxtext at e591f30c, `configs/base.yml` and `configs/models/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

Values = dict[str, Any]

# Keys that change a step unless they have this value.
_NEUTRAL: Values = {
    "quantization": "",
    "dropout_rate": 0.0,
    "grad_dtype": "float32",
    "mtp_num_layers": 0,
    "shared_experts": 0,
    "first_num_dense_layers": 0,
    "interleave_moe_layer_step": 1,
    "num_pipeline_repeats": -1,
    "rope_type": "default",
    "rope_linear_scaling_factor": 1.0,
    "scan_layers": True,
    "parameter_memory_host_offload": False,
    "shard_optimizer_over_data": False,
    "use_batch_split_schedule": False,
    "z_loss_multiplier": 0.0,
    "num_kv_shared_layers": 0,
}
# Beginnings of keys about data, files, reports, the run, learning rates and other libraries.
_WITHOUT_EFFECT = (
    *("run_name", "base_config", "base_output_directory", "model_name", "override_model_config"),
    *("dataset_", "eval", "tokenizer_", "enable_", "checkpoint_", "load_", "save_", "async_"),
    *("hf_", "grain_", "tfds_", "gcs_", "metrics_", "profile", "skip_", "log_", "steps", "jax_"),
    *("learning_rate", "warmup_", "cosine_", "adam", "gradient_clipping", "reuse_example_batch"),
    *("hardware", "use_vertex", "vertex_", "monitor_", "goodput", "use_iota_embed", "target_eval"),
    *("init_weights_seed", "data_shuffle", "vocab_path", "packing", "max_checkify", "xprof"),
    *("per_device_batch_size_", "allow_split", "sharding_tolerance", "logits_dot_in_fp32"),
    *("normalize_embedding_logits", "image_placeholder", "use_untrainable", "max_position_emb"),
    *("original_max_pos", "rope_", "beta_", "mscale", "load_balance", "routed_bias", "megablox"),
    *("inhomogeneous_layer_cycle", "use_chat_template", "max_segments", "matmul_precision"),
)


class MaxTextValues:
    """Values of keys that records which ones were read.

    Args:
        values: All values.
        defaults: Values of the first file.
        chosen: Keys that are not only in the first file.
    """

    def __init__(self, values: Values, defaults: Values, chosen: set[str]):
        self._values, self._defaults, self.chosen = values, defaults, chosen
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        if key not in self._values:
            raise ValueError(
                f"The configuration of MaxText has no key {key}. Pass MaxText's base.yml as the "
                "first argument: it has the default of each key."
            )
        value, default = self._values[key], self._defaults.get(key)
        if default is not None and (kind := _mismatch(value, default)):
            raise ValueError(
                f"MaxText's configuration says {key}={value}, but this key is {kind}: "
                f"{default} in the first file. Change the key."
            )
        return value

    def get(self, key: str, default: Any) -> Any:
        """Returns the value of a key that older files may lack."""
        return self[key] if key in self._values else default

    def ignore(self, *keys: str) -> None:
        """Reports keys as unmapped although they were read."""
        self._read -= set(keys)

    def find_unmapped_keys(self) -> tuple[str, ...]:
        """Returns the keys, with values, that change a step and were not read."""
        found = []
        for key, value in self._values.items():
            if key in self._read or (key in _NEUTRAL and value == _NEUTRAL[key]):
                continue
            has_effect = key in _NEUTRAL or not key.startswith(_WITHOUT_EFFECT)
            if has_effect and (key in _NEUTRAL or key in self.chosen) and not key.endswith("_vit"):
                found.append(f"{key}={value}")
        return tuple(sorted(found))


def read_values(arguments: Sequence[str]) -> MaxTextValues:
    """Returns the values of a YAML file and `key=value` overrides, as MaxText combines them.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a file is not YAML, or an override is not `key=value`.
    """
    path, *overrides = arguments
    files = [Path(path)]
    while (base := _read_file(files[0]).get("base_config")) is not None:
        files.insert(0, files[0].parent / base)
    values: Values = {}
    chosen: set[str] = set()
    for file in files:
        more = _read_file(file)
        values |= more
        chosen |= set() if file == files[0] else set(more)
    written: Values = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(
                f"--maxtext {path} {override}: an override must have the form key=value, such as "
                "per_device_batch_size=2."
            )
        written[key] = yaml.safe_load(value)
    name = (values | written).get("model_name", "default")
    if name != "default":
        model = _read_file(files[0].parent / "models" / f"{name}.yml")
        values |= model
        chosen |= set(model)
    return MaxTextValues(values | written, _read_file(files[0]), chosen | set(written))


def _mismatch(value: object, default: object) -> str:
    """Returns the kind of value that a key needs; empty if the value has it."""
    if isinstance(default, list) or isinstance(value, list):
        return "" if type(value) is type(default) else f"a {type(default).__name__}"
    if isinstance(default, bool) or not isinstance(default, int | float):
        return ""
    kind = "a whole number" if isinstance(default, int) else "a number"
    try:
        number = float(value)  # pyright: ignore[reportArgumentType] - YAML reads 1e-6 as a text
    except (TypeError, ValueError):
        return kind
    is_whole = isinstance(default, float) or number.is_integer()
    return "" if is_whole and not isinstance(value, bool) else kind


def _read_file(file: Path) -> Values:
    try:
        values = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file} does not exist. Pass the path of MaxText's base.yml; the file of the model is "
            "in the folder models next to it."
        ) from None
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {error}. Pass MaxText's base.yml.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} has no keys. Pass MaxText's base.yml.")
    return values
