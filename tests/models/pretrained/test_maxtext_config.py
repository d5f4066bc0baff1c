"""A command line of MaxText becomes the same model and step; other keys are reported."""

import pytest
import yaml

from maxtext_base import BASE
from tpudist.models import TransformerConfig
from tpudist.models.presets import PRESETS
from tpudist.models.pretrained.maxtext_config import read_maxtext

MIXTRAL = """
decoder_block: "mixtral"
base_emb_dim: 4096
base_num_query_heads: 32
base_num_kv_heads: 8
base_mlp_dim: 14336
base_moe_mlp_dim: 14336
base_num_decoder_layers: 32
num_experts: 8
num_experts_per_tok: 2
rope_max_timescale: 1_000_000
"""


@pytest.fixture
def read(tmp_path):
    """Returns a function of overrides, and perhaps of devices and slices."""
    (tmp_path / "models").mkdir()
    (tmp_path / "base.yml").write_text(BASE)
    (tmp_path / "models" / "mixtral-8x7b.yml").write_text(MIXTRAL)

    def read(overrides, num_devices=256, num_slices=1, largest_tile=None):
        arguments = [str(tmp_path / "base.yml"), *overrides.split()]
        return read_maxtext(arguments, num_devices, num_slices, largest_tile)

    return read


def test_the_script_of_the_16b_model_is_the_preset(read):
    """MaxText, configs/tpu/v5e/16b.sh."""
    step = read(
        "steps=15 per_device_batch_size=6 enable_checkpointing=false remat_policy=full "
        "global_parameter_scale=16 max_target_length=2048 base_output_directory=gs://x "
        "use_iota_embed=true reuse_example_batch=1 dataset_type=synthetic attention='flash' "
        "gcs_metrics=true"
    )
    preset = PRESETS["dense-16b"].config
    sizes = ("vocabulary", "num_layers", "embed_dim", "num_heads", "head_dim", "mlp_dim", "remat")
    for name in (*sizes, "dtype", "attention"):
        assert getattr(step.config, name) == getattr(preset, name)
    assert (step.global_batch, step.length) == (6 * 256, 2048)
    assert step.replica_axes == {"fsdp": 256}
    assert step.unmapped == ()


def test_axes_within_and_between_slices_multiply(read):
    overrides = "ici_tensor_parallelism=4 dcn_fsdp_parallelism=2 per_device_batch_size=1"
    step = read(overrides, num_devices=64, num_slices=4)
    assert step.replica_axes == {"fsdp": 8, "tensor": 4}  # and 2 replicas
    overrides += " ici_pipeline_parallelism=4 ici_fsdp_parallelism=1 num_pipeline_microbatches=8"
    config = read(overrides, num_devices=64, num_slices=4).config
    assert (config.pipeline_stages, config.pipeline_microbatches) == (4, 8)


def test_a_model_has_its_file_and_experts_are_grouped(read):
    config = read("model_name=mixtral-8x7b per_device_batch_size=2").config
    assert config.expert_method == "grouped"
    expected = {"num_experts": 8, "experts_per_token": 2, "kv_heads": 8, "mlp_dim": 14336}
    expected |= {"rotary_base": 1e6, "expert_capacity": 4.0}
    assert {name: getattr(config, name) for name in expected} == expected
    config = read("model_name=mixtral-8x7b sparse_matmul=false capacity_factor=1.25").config
    assert (config.expert_method, config.expert_capacity) == ("dispatch", 1.25)


def test_a_tile_that_the_compiler_rejects_is_not_mapped(read):
    """MaxText's recipes have such tiles together with flags of the compiler."""
    step = read("sa_block_q=1024 sa_block_kv=1024", largest_tile=512)
    assert step.config.splash_block is None
    assert {"sa_block_q=1024", "sa_block_kv=1024"} <= set(step.unmapped)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("remat_policy=minimal_offloaded", {"remat": "minimal_offloaded"}),
        (
            "remat_policy=custom decoder_layer_input=offload query_proj=device mlpwi_0=offload",
            {"remat": "save:query+offload:layer_input,mlp_in"},
        ),
        ("weight_dtype=bfloat16", {"param_dtype": "bfloat16"}),
        ("num_vocab_tiling=4", {"loss_chunk": 512}),
        (
            "sa_block_q=1024 sa_block_kv=1024",
            {"splash_block": 1024, "splash_fused_backward": False},  # MaxText's default
        ),
        ("sa_use_fused_bwd_kernel=true", {"splash_fused_backward": True}),
        ("decoder_block=qwen3 use_qk_norm=true", {"norm_heads": True}),
        ("decoder_block=gemma mlp_activations=['gelu','linear']", {"gelu": True}),
        (
            "decoder_block=gpt_oss mlp_activations=['sigmoid','linear'] mlp_activations_limit=7.0 "
            "num_experts=4 sliding_window_size=128 mlp_bias=true attention_sink=true",
            {"swiglu_limit": 7.0, "attention_sinks": True, "biased_mlp": True},
        ),
        (
            "decoder_block=gpt3 mlp_activations=['gelu'] trainable_position_size=4096",
            {"norm": "layer", "gated": False, "learned_positions": 4096},
        ),
    ],
)
def test_keys_become_fields(read, overrides, expected):
    config = read(overrides).config
    assert isinstance(config, TransformerConfig)
    assert {name: getattr(config, name) for name in expected} == expected


def test_the_optimizer_and_parts_of_a_batch_are_read(read):
    step = read(
        "opt_type=sgd mu_dtype=bfloat16 optimizer_memory_host_offload=true "
        "gradient_accumulation_steps=2 per_device_batch_size=0.5"
    )
    assert (step.optimizer, step.mu_dtype, step.optimizer_memory) == (
        *("sgd", "bfloat16"),
        "pinned_host",
    )
    assert (step.microbatches, step.global_batch) == (2, 256)


def test_keys_that_are_not_mapped_are_reported(read):
    step = read("quantization=int8 use_qk_clip=true learning_rate=1e-4 scan_layers=true")
    assert step.unmapped == ("quantization=int8", "use_qk_clip=True")


def test_a_file_may_have_a_base(read, tmp_path):
    own = {"base_config": "base.yml", "per_device_batch_size": 4, "mystery": 3}
    (tmp_path / "own.yml").write_text(yaml.safe_dump(own))
    step = read_maxtext([str(tmp_path / "own.yml")], 8, 1)
    assert (step.global_batch, step.unmapped) == (32, ("mystery=3",))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("decoder_block=deepseek", "decoder_block=deepseek, which is not one of llama2"),
        ("attention_type=mla", "attention_type=mla, which is not supported"),
        ("remat_policy=some", "remat_policy=some, which is not one of none"),
        ("mlp_activations=['relu']", "mlp_activations=.'relu'., which is not supported"),
        ("opt_type=muon", "opt_type=muon, which is not one of adamw"),
        ("per_device_batch_size=0.001", "gives 0.256 sequences on 256 devices"),
        ("ici_fsdp_parallelism=3", "is for 3 devices, but there are 256 in the slice"),
        ("ici_data_parallelism=3", "is for 255 devices, but there are 256 in the slice"),
        ("ici_tensor_parallelism=0", "is for 0 devices"),
        ("global_parameter_scale=3", "global_parameter_scale=3, which is not a power of 2"),
        ("remat_policy=custom mlpwi=save", "mlpwi=save, which is not one of remat, device"),
        ("base_emb_dim=wide", "base_emb_dim=wide, but this key is a whole number: 2048 in the"),
        ("base_num_decoder_layers=2.5", "layers=2.5, but this key is a whole number"),
        ("ici_fsdp_parallelism=true", "ici_fsdp_parallelism=True, but this key is a whole number"),
        ("mlp_activations=gelu", "mlp_activations=gelu, but this key is a list"),
        ("num_experts=0", "num_experts=0, which must be at least 1"),
        ("num_experts=8 num_experts_per_tok=0", "num_experts_per_tok=0, which must be at least 1"),
        ("steps", "an override must have the form key=value"),
        ("model_name=none", "none.yml does not exist"),
    ],
)
def test_an_unsupported_step_is_rejected_with_its_key(read, overrides, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read(overrides)


def test_other_files_are_rejected(tmp_path):
    file = tmp_path / "base.yml"
    missing = "has no key max_target_length"
    for text, message in (("- a", "has no keys"), ("a: [", "is not YAML"), ("a: 1", missing)):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_maxtext([str(file)], 8, 1)
