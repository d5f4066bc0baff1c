"""Published models have their published number of parameters, from only their `config.json`."""

import json

import jax
import pytest

from tpudist.models.presets import make_transformer
from tpudist.models.pretrained.hub_config import parse_config, read_planned

_NEVER_MAPPED = {"initializer_range": 0.02, "use_cache": True, "transformers_version": "4.57.0"}
# The keys with an effect of each config.json, as published, and the parameters of its weights:
# `safetensors.total` of each model on the hub. keras-hub's presets of Mixtral 8x7B and Phi-3-mini
# (`params`), and GGUF files of Qwen3-30B-A3B and gpt-oss-20b (`n_params`), have the same numbers.
PUBLISHED = {
    "mistralai/Mixtral-8x7B-v0.1": (
        46_702_792_704,
        {
            "model_type": "mixtral",
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 32000,
        },
    ),
    "Qwen/Qwen3-30B-A3B": (
        30_532_122_624,
        {
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "openai/gpt-oss-20b": (
        20_914_757_184,
        {
            "model_type": "gpt_oss",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "quantization_config": {"quant_method": "mxfp4"},
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": 201088,
        },
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        3_821_079_552,
        {
            "model_type": "phi3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "embd_pdrop": 0.0,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096,
            "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "sliding_window": 2047,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 32064,
        },
    ),
    "allenai/OLMo-2-1124-7B": (
        7_298_617_344,
        {
            "model_type": "olmo2",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "vocab_size": 100352,
        },
    ),
    "openai-community/gpt2": (
        124_439_808,
        {
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "attn_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "layer_norm_epsilon": 1e-05,
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "summary_type": "cls_index",
            "task_specific_params": {"text-generation": {"do_sample": True}},
            "vocab_size": 50257,
        },
    ),
}
NOTES = {
    "mistralai/Mixtral-8x7B-v0.1": "these keys are not mapped: router_aux_loss_coef",
    "Qwen/Qwen3-30B-A3B": "these keys are not mapped: router_aux_loss_coef",
    "openai/gpt-oss-20b": (
        "quantization_config is not planned: weights are not quantized; these keys are not mapped: "
        "experts_per_token, initial_context_length, router_aux_loss_coef"
    ),
    "microsoft/Phi-3-mini-4k-instruct": "",
    "allenai/OLMo-2-1124-7B": "",
    "openai-community/gpt2": (
        "there is no dtype, so float32 is planned: pass --dtype for another; these keys are not "
        "mapped: attn_pdrop, embd_pdrop, resid_pdrop"
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_the_published_number_of_parameters(name, tmp_path):
    number, values = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(values | _NEVER_MAPPED))
    config, length, note = read_planned(tmp_path)
    shapes = jax.eval_shape(lambda: jax.tree.leaves(make_transformer(config)))
    assert sum(x.size for x in shapes) == number
    assert length == values.get("max_position_embeddings", 1024)
    assert note == NOTES[name]


def change(name, **changes):
    values = PUBLISHED[name][1] | changes
    return {key: value for key, value in values.items() if value is not ...}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", {"sliding_window": 4096}, {"attention_window": 4096}),
        ("mistralai/Mixtral-8x7B-v0.1", {}, {"expert_method": "grouped", "expert_capacity": 4.0}),
        ("Qwen/Qwen3-30B-A3B", {"norm_topk_prob": ...}, {"normalize_shares": False}),
        (
            "microsoft/Phi-3-mini-4k-instruct",
            {"partial_rotary_factor": 0.75},
            {"rotary_width": 72},
        ),
        ("openai-community/gpt2", {"n_inner": 1024}, {"mlp_dim": 1024}),
    ],
)
def test_options_of_families_become_fields(name, changes, expected):
    config = parse_config(change(name, **changes))
    assert {key: getattr(config, key) for key in expected} == expected


def test_longrope_has_factors_for_each_pair():
    factors = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    name = "microsoft/Phi-3-mini-4k-instruct"
    values = change(name, rope_scaling=factors, max_position_embeddings=131072)
    scaling = parse_config(values).rotary_scaling
    assert scaling.long_factors == (2.0,) * 48
    # sqrt(1 + ln(32) / ln(4096)), from the code of the package `transformers`.
    assert scaling.magnitude == pytest.approx(1.19024, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("Qwen/Qwen3-30B-A3B", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("Qwen/Qwen3-30B-A3B", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("openai/gpt-oss-20b", {}, "quantization_config"),
        ("openai-community/gpt2", {"activation_function": "relu"}, "activation_function"),
        ("openai-community/gpt2", {"n_embd": None}, "hidden_size"),
        ("Qwen/Qwen3-30B-A3B", {"num_attention_heads": 0}, "num_attention_heads"),
        (
            "openai-community/gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx",
        ),
    ],
)
def test_an_unsupported_option_of_a_family_is_rejected(name, changes, key):
    with pytest.raises(ValueError, match=rf"config\.json says {key}: "):
        parse_config(change(name, **changes))
