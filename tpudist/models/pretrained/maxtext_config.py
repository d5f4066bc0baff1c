"""MaxText's configuration, a YAML file and `key=value` overrides, as a model and a step to plan.

Source: AI-Hypercomputer/maxtext at e591f30c, `configs/base.yml`, `configs/types.py` and
`configs/models/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpudist.models.pretrained.maxtext_file import MaxTextValues, Values, read_values
from tpudist.models.transformer_config import TransformerConfig

# The mesh axis of each axis of MaxText; the axes `data` and `diloco` are the replicas.
_AXES = {
    "fsdp": "fsdp",
    "fsdp_transpose": "fsdp",
    "context": "sequence",
    "sequence": "sequence",
    "tensor": "tensor",
    "tensor_sequence": "tensor",
    "autoregressive": "tensor",
    "expert": "expert",
    "pipeline": "stage",
}
# Names of the tensors of a block in remat policies, here and there.
_TENSORS = {
    "decoder_layer_input": ("layer_input",),
    "query_proj": ("query",),
    "key_proj": ("key",),
    "value_proj": ("value",),
    "qkv_proj": ("query", "key", "value"),
    "context": ("attention",),
    "out_proj": ("attention_out",),
    "mlpwi": ("mlp_in",),
    "mlpwi_0": ("mlp_in",),
    "mlpwi_1": ("mlp_in",),
    "mlpwo": ("mlp_out",),
    "moe_mlpwi_0": ("mlp_in",),
    "moe_mlpwi_1": ("mlp_in",),
    "moe_mlpwo": ("mlp_out",),
}
_REMAT = {
    "none": "none",
    "full": "full",
    "minimal": "minimal",
    "minimal_with_context": "minimal_with_context",
    "minimal_flash": "minimal_with_context",  # its older name
    "minimal_offloaded": "minimal_offloaded",
    "save_qkv_proj": "save_qkv",
    "qkv_proj_offloaded": "offload_qkv",
    "save_out_proj": "save:attention_out",
    "save_dot_except_mlp": "save_projections",
    "save_dot_except_mlpwi": "save:query,key,value,attention_out,mlp_out",
    "save_dot_with_context_except_mlp": "save:query,key,value,attention,attention_out",
}
_OPTIMIZERS = {"adamw": "adamw", "adam_pax": "adamw", "sgd": "sgd"}
_ATTENTION = {"autoselected": "auto", "flash": "auto", "cudnn_flash_te": "auto"}


@dataclass(frozen=True)
class MaxTextStep:
    """A training step of MaxText.

    Attributes:
        config: Configuration of the model.
        length: Tokens of a sequence.
        global_batch: Sequences of all devices in a step.
        replica_axes: Mesh axes inside a replica.
        microbatches: Number of parts of a batch, one after the other.
        optimizer: Name of the optimizer.
        mu_dtype: Dtype of the first moments; None for the dtype of the parameters.
        optimizer_memory: Memory kind of the optimizer state.
        unmapped: Keys with their values that this step does not contain.
    """

    config: TransformerConfig
    length: int
    global_batch: int
    replica_axes: dict[str, int]
    microbatches: int
    optimizer: str
    mu_dtype: str | None
    optimizer_memory: str
    unmapped: tuple[str, ...]


def read_maxtext(
    arguments: Sequence[str], num_devices: int, num_slices: int, largest_tile: int | None = None
) -> MaxTextStep:
    """Returns the training step that a command line of MaxText describes.

    Args:
        arguments: Path of a YAML file such as `base.yml`, and `key=value` overrides.
        num_devices: Number of devices of all slices.
        num_slices: Number of slices.
        largest_tile: Most rows of a tile of attention that the compiler accepts; None for all.
            Larger tiles are not mapped, so the model chooses its own.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If an argument is not `key=value`, or the transformer does not support the
            model; the error names the key.
    """
    values = read_values(arguments)
    length, microbatches = values["max_target_length"], values["gradient_accumulation_steps"]
    rows = values["per_device_batch_size"] * num_devices * microbatches
    if rows < 1 or rows != int(rows):
        raise _error(
            "per_device_batch_size",
            values["per_device_batch_size"],
            f"gives {rows:g} sequences on {num_devices} devices, and a batch must have a whole "
            "number",
        )
    optimizer = values["opt_type"]
    if optimizer not in _OPTIMIZERS:
        raise _error("opt_type", optimizer, f"is not one of {', '.join(_OPTIMIZERS)}")
    axes = _axes(values, num_devices, num_slices)
    return MaxTextStep(
        config=_config(values, length, axes, largest_tile),
        length=length,
        global_batch=int(rows),
        replica_axes=axes,
        microbatches=microbatches,
        optimizer=_OPTIMIZERS[optimizer],
        mu_dtype=values["mu_dtype"] or None,
        optimizer_memory="pinned_host" if values["optimizer_memory_host_offload"] else "device",
        unmapped=values.find_unmapped_keys(),
    )


def _error(key: str, value: object, reason: str) -> ValueError:
    return ValueError(
        f"MaxText's configuration says {key}={value}, which {reason}. Change the key, or plan the "
        "step of MaxText itself."
    )


def _axes(values: MaxTextValues, num_devices: int, num_slices: int) -> dict[str, int]:
    """Returns the axes inside a replica; an axis within slices and between them is one."""
    axes: dict[str, int] = {}
    for network, total in (("ici", num_devices // num_slices), ("dcn", num_slices)):
        sizes = {
            name: values.get(f"{network}_{name}_parallelism", 1)
            for name in ("data", "diloco", *_AXES)
        }
        known = math.prod(size for size in sizes.values() if size != -1)
        # As in MaxText: one axis may be -1, for all devices that the others leave.
        left = total // known if known > 0 else 0
        filled = {name: left if size == -1 else size for name, size in sizes.items()}
        if (product := math.prod(filled.values())) != total:
            raise _error(
                f"{network}_*_parallelism",
                {name: size for name, size in sizes.items() if size != 1},
                f"is for {product} devices, but there are {total} in the slice"
                if network == "ici"
                else f"is for {product} slices, but there are {total}",
            )
        for name, axis in _AXES.items():
            if filled[name] > 1:
                axes[axis] = axes.get(axis, 1) * filled[name]
    return axes


def _config(
    values: MaxTextValues, length: int, axes: dict[str, int], largest_tile: int | None
) -> TransformerConfig:
    block = values["decoder_block"]
    if block not in _BLOCKS:
        raise _error("decoder_block", block, f"is not one of {', '.join(_BLOCKS)}")
    if values.get("attention_type", "global") not in ("global", "local_sliding"):
        raise _error("attention_type", values["attention_type"], "is not supported")
    # As `get_individual_scales` of MaxText: a scale of 2 ** 3 doubles every dim once.
    factor = values["global_parameter_scale"]
    if factor not in [2**i for i in range(32)]:
        raise _error("global_parameter_scale", factor, "is not a power of 2")
    scale = int(math.log2(factor))
    whole, rest = divmod(scale, 3)
    heads_scale, embed_scale = 2 ** (whole + (rest > 0)), 2 ** (whole + (rest > 1))
    stages = axes.get("stage", 1)
    parts = values.get("num_pipeline_microbatches", -1)
    tiles = values.get("num_vocab_tiling", 1)
    fields: Values = {
        "vocabulary": values["vocab_size"],
        "num_layers": values["base_num_decoder_layers"] * 2**whole,
        "embed_dim": values["base_emb_dim"] * embed_scale,
        "num_heads": values["base_num_query_heads"] * heads_scale,
        "num_kv_heads": values["base_num_kv_heads"] * heads_scale,
        "head_width": values["head_dim"],
        "mlp_dim": values["base_mlp_dim"] * heads_scale,
        "tied": values["logits_via_embedding"],
        "dtype": values["dtype"],
        "param_dtype": values["weight_dtype"],
        "norm_epsilon": float(values["normalization_layer_epsilon"]),
        "rotary_base": float(values["rope_max_timescale"]),
        "attention": _ATTENTION.get(values["attention"], values["attention"]),
        "attention_cap": values.get("attn_logits_soft_cap", None) or None,
        "output_cap": values.get("final_logits_soft_cap", None) or None,
        "remat": _remat(values),
        "loss_chunk": length // tiles if tiles > 1 else None,
        "pipeline_stages": stages,
        "pipeline_microbatches": None if stages == 1 or parts == -1 else parts,
        "biased": values.get("attention_bias", False),
        "norm_heads": values.get("use_qk_norm", False),
    }
    if values.get("attention_type", "global") == "local_sliding":
        fields["attention_window"] = values["sliding_window_size"]
    fields |= _activation(values) | _experts(values, heads_scale)
    fields |= _tiles(values, largest_tile)
    fields["splash_fused_backward"] = values.get("sa_use_fused_bwd_kernel", False)
    return TransformerConfig(**fields | _BLOCKS[block](values, fields))


def _remat(values: MaxTextValues) -> str:
    policy = values["remat_policy"]
    if policy in _REMAT:
        return _REMAT[policy]
    if policy != "custom":
        raise _error("remat_policy", policy, f"is not one of {', '.join(_REMAT)} or custom")
    chosen: dict[str, list[str]] = {"device": [], "offload": []}
    for key, names in _TENSORS.items():
        choice = values.get(key, "remat")
        # The scan keeps the input of a layer anyway.
        if choice == "remat" or (key, choice) == ("decoder_layer_input", "device"):
            continue
        if choice not in chosen:
            raise _error(key, choice, "is not one of remat, device, offload")
        chosen[choice] += [name for name in names if name not in chosen[choice]]
    parts = {"save": chosen["device"], "offload": chosen["offload"]}
    return "+".join(f"{verb}:{','.join(names)}" for verb, names in parts.items() if names) or "full"


def _activation(values: MaxTextValues) -> Values:
    kinds, limit = tuple(values["mlp_activations"]), values.get("mlp_activations_limit", -1.0)
    known = {
        ("silu", "linear"): {},
        ("gelu", "linear"): {"gelu": True},
        ("gelu",): {"gated": False},
    }
    if kinds == ("sigmoid", "linear") and limit > 0:
        return {"swiglu_limit": limit}
    if kinds not in known:
        raise _error("mlp_activations", list(kinds), "is not supported")
    return known[kinds]


def _experts(values: MaxTextValues, scale: int) -> Values:
    num_experts, choices = values["num_experts"], values["num_experts_per_tok"]
    factor = values["capacity_factor"]
    is_grouped = values["sparse_matmul"]
    room = values.get("ragged_buffer_factor", -1.0) if is_grouped else factor
    for key, value in (("num_experts", num_experts), ("num_experts_per_tok", choices)):
        if value < 1:
            raise _error(key, value, "must be at least 1; a model without experts has 1 of both")
    if num_experts == 1:
        return {}
    width = values.get("base_moe_mlp_dim", -1)
    return {
        "num_experts": num_experts,
        "experts_per_token": choices,
        "mlp_dim": (values["base_mlp_dim"] if width == -1 else width) * scale,
        "expert_method": "grouped" if is_grouped else "dispatch",
        # Without a factor, no token is dropped.
        "expert_capacity": room if room > 0 else num_experts / choices,
    }


def _tiles(values: MaxTextValues, largest: int | None) -> Values:
    """Returns the tiles of attention, if they were chosen, are square and not too large."""
    rows, columns = "sa_block_q", "sa_block_kv"
    if not {rows, columns} & values.chosen or values[rows] != values[columns]:
        return {}
    if largest is not None and values[rows] > largest:
        values.ignore(rows, columns)
        return {}
    fields = {"splash_block": values[rows]}
    if "sa_block_kv_dkv" in values.chosen and values["sa_block_kv_dkv"] % values[rows] == 0:
        fields["splash_backward_block"] = values["sa_block_kv_dkv"]
    return fields


def _plain(values: MaxTextValues, fields: Values) -> Values:
    return {}


def _with_window(is_local: Callable[[int], bool]) -> Callable[[MaxTextValues, int], Values]:
    def fields(values: MaxTextValues, num_layers: int) -> Values:
        return {
            "attention_window": values["sliding_window_size"],
            "layers_with_window": tuple(is_local(i) for i in range(num_layers)),
        }

    return fields


def _gemma(values: MaxTextValues, fields: Values) -> Values:
    scale = float(fields["embed_dim"]) ** 0.5
    return {"norm_offset": True, "embedding_scale": scale, "output_scale": 1.0}


def _gemma2(values: MaxTextValues, fields: Values) -> Values:
    # A layer of MaxText is a layer with a window and one without.
    layers = 2 * fields["num_layers"]
    windows = _with_window(lambda i: i % 2 == 0)(values, layers)
    norms = {"norm_outputs": values["use_post_attn_norm"] and values["use_post_ffw_norm"]}
    return _gemma(values, fields) | windows | norms | {"num_layers": layers}


def _gemma3(values: MaxTextValues, fields: Values) -> Values:
    windows = _with_window(lambda i: i % 6 != 5)(values, fields["num_layers"])
    norms = {"norm_outputs": values["use_post_attn_norm"] and values["use_post_ffw_norm"]}
    local = float(values["local_rope_max_timescale"])
    more = {"norm_heads": True, "local_rotary_base": local if local > 0 else None}
    return _gemma(values, fields) | windows | norms | more


def _gpt3(values: MaxTextValues, fields: Values) -> Values:
    return {
        "norm": "layer",
        "learned_positions": values["trainable_position_size"],
        "biased": True,
        "biased_outputs": True,
        "biased_mlp": True,
    }


def _gpt_oss(values: MaxTextValues, fields: Values) -> Values:
    return _with_window(lambda i: i % 2 == 0)(values, fields["num_layers"]) | {
        "biased_outputs": fields["biased"],
        "biased_mlp": values["mlp_bias"],
        "attention_sinks": values["attention_sink"],
    }


def _olmo3(values: MaxTextValues, fields: Values) -> Values:
    return _with_window(lambda i: i % 4 != 3)(values, fields["num_layers"]) | {
        "norm_inputs": False,
        "norm_outputs": True,
        "norm_heads": False,
        "norm_projections": fields["norm_heads"],
    }


def _qwen3_moe(values: MaxTextValues, fields: Values) -> Values:
    return {"normalize_shares": values["norm_topk_prob"]}


_BLOCKS: dict[str, Callable[[MaxTextValues, Values], Values]] = {
    **dict.fromkeys(("llama2", "mistral", "mixtral", "qwen2", "qwen3"), _plain),
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt3": _gpt3,
    "gpt_oss": _gpt_oss,
    "olmo3": _olmo3,
}
"""Function that returns the fields of each `decoder_block`, from the values and other fields."""
