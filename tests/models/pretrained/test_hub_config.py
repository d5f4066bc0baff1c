"""`config.json` is parsed as in `transformers`; unsupported models raise an error."""

import dataclasses
import re

import pytest

from pretrained_folders import config_of
from tpudist.models import TransformerConfig
from tpudist.models.parts.rotary_stretch import RotaryScaling
from tpudist.models.pretrained import rotary_config
from tpudist.models.pretrained.config_export import make_config
from tpudist.models.pretrained.hub_config import parse_config

# meta-llama/Llama-3.1-8B, config.json, in the format of older versions.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def test_the_config_of_llama_matches_its_authors():
    assert parse_config(LLAMA_8B) == TransformerConfig(
        vocabulary=128_256,
        num_layers=32,
        embed_dim=4096,
        num_heads=32,
        num_kv_heads=8,
        head_width=128,
        mlp_dim=14_336,
        norm_epsilon=1e-5,
        rotary_base=500_000.0,
        rotary_scaling=RotaryScaling("llama3", 8.0, 8192, 1.0, 4.0),
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        # Defaults come from the class of each family and differ between families.
        ("mistral", {"sliding_window": ...}, {"attention_window": 4096}),
        ("mistral", {"sliding_window": None}, {"attention_window": None}),
        ("mistral", {"num_key_value_heads": ..., "num_attention_heads": 8}, {"kv_heads": 8}),
        ("llama", {"num_key_value_heads": ...}, {"kv_heads": 4}),
        ("llama", {"tie_word_embeddings": ...}, {"tied": False}),
        ("llama", {"rms_norm_eps": ...}, {"norm_epsilon": 1e-6}),
        ("llama", {"rope_parameters": ...}, {"rotary_base": 1e4, "rotary_scaling": None}),
        ("llama", {"rope_parameters": ..., "rope_theta": 7.0}, {"rotary_base": 7.0}),
        ("llama", {"dtype": "float16"}, {"dtype": "float32"}),
        ("llama", {"dtype": ..., "torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ("qwen3", {"head_dim": ...}, {"head_dim": 128}),
        ("qwen2", {"layer_types": ...}, {"layers_with_window": (False, True)}),
        ("qwen2", {"layer_types": ..., "max_window_layers": 0}, {"layers_with_window": None}),
        ("qwen2", {"layer_types": ..., "use_sliding_window": False}, {"attention_window": None}),
        ("gemma", {"tie_word_embeddings": ...}, {"tied": True, "output_scale": 1.0}),
        ("gemma", {"hidden_act": "gelu"}, {"gelu": True}),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, {"gelu": True}),
        ("gemma2", {"layer_types": ...}, {"layers_with_window": (True, False, True)}),
        ("gemma2", {"final_logit_softcapping": ...}, {"output_cap": 30.0}),
        ("gemma2", {"attn_logit_softcapping": ...}, {"attention_cap": 50.0}),
        ("gemma2", {"query_pre_attn_scalar": ...}, {"query_scale": 1 / 16}),
        ("gemma3", {"layer_types": ..., "sliding_window_pattern": 2}, {}),
        ("gemma3", {"layer_types": ...}, {"layers_with_window": None, "local_rotary_base": 50.0}),
        (
            "gemma3",
            {"rope_parameters": ..., "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {
                "rotary_base": 1e6,
                "local_rotary_base": 1e4,
                "rotary_scaling": RotaryScaling("linear", 8.0),
            },
        ),
        (
            "gemma3",
            {"rope_parameters": ..., "rope_theta": 5.0, "rope_local_base_freq": 3.0},
            {"rotary_base": 5.0, "local_rotary_base": 3.0},
        ),
        (
            "llama",
            {"rope_parameters": ..., "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            {"rotary_scaling": RotaryScaling("dynamic", 2.0, 64)},
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0}},
            {"rotary_scaling": RotaryScaling("yarn", 4.0, 64, 1.0, 32.0, 1.1386294361119891)},
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 3}},
            {"rotary_scaling": RotaryScaling("yarn", 1.0, 64, 1.0, 32.0, 3.0)},
        ),
    ],
)
def test_a_missing_key_has_the_default_of_its_family(name, changes, expected):
    config = parse_config(config_of(name, **changes))
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("llama", {"model_type": "mamba"}, "model_type"),
        ("llama", {"model_type": "gemma3"}, "model_type"),  # with images
        ("llama", {"model_type": ...}, "model_type"),
        ("llama", {"hidden_size": ...}, "hidden_size"),
        ("llama", {"intermediate_size": ...}, "intermediate_size"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_parameters"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ("gemma", {"hidden_act": "silu"}, "hidden_activation"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma2", {"sliding_window": None}, "sliding_window"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters",
        ),
    ],
)
def test_an_unsupported_model_is_rejected_with_its_key(name, changes, key):
    with pytest.raises(
        ValueError, match=rf"config\.json says {key}: .*would compute a different result"
    ):
        parse_config(config_of(name, **changes))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_window": 0}, "needs attention_window >= 1; got 0"),
        ({"attention_cap": 0.0}, "needs attention_cap > 0; got 0.0"),
        ({"norm": "layernorm"}, "norm='layernorm' is not one of rms, layer"),
        ({"expert_method": "ragged"}, "expert_method='ragged' is not one of dispatch, grouped"),
        ({"layers_with_window": (True,)}, "no layer has a window. Pass both or neither"),
        ({"local_rotary_base": 3.0}, "no layer has a window. Pass both or neither"),
        (
            {"attention_window": 2, "layers_with_window": (True,)},
            "layers_with_window has 1 entries",
        ),
        ({"gelu": True, "gated": False}, "gelu=True is only for gated MLPs"),
    ],
)
def test_invalid_transformer_fields_are_rejected(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TransformerConfig(**fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("linear", 0.0), "a factor above 0; got 0.0"),
        (("dynamic", 2.0), "'dynamic' needs original_length"),
        (("llama3", 2.0, 16, 4.0, 4.0), "more than high turns; got low=4.0, high=4.0"),
    ],
)
def test_invalid_rotary_scaling_is_rejected(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RotaryScaling(*arguments)


def test_yarn_without_a_factor_and_lengths_is_rejected():
    with pytest.raises(ValueError, match="a factor above 0; got 0"):
        rotary_config.parse_rotary({"rope_scaling": {"rope_type": "yarn"}})


def test_the_presets_are_models_of_known_families():
    from tpudist.models.presets import PRESETS

    families = {
        name: make_config(preset.config, "float32")["model_type"]
        for name, preset in PRESETS.items()
        if not preset.config.num_experts
    }
    assert set(families.values()) == {"llama"}
    config = dataclasses.replace(PRESETS["llama-3.1-8b"].config, biased=True)
    assert make_config(config, "float32")["model_type"] == "qwen2"
