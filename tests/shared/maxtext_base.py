"""A small file in the form of MaxText's base.yml."""

# The keys of MaxText's base.yml that a step needs, and some without an effect on it.
BASE = """
run_name: ""
model_name: "default"
steps: 150_001
normalization_layer_epsilon: 1.e-05
dtype: "bfloat16"
weight_dtype: "float32"
grad_dtype: "float32"
quantization: ""
decoder_block: "llama2"
global_parameter_scale: 1
base_emb_dim: 2048
base_num_query_heads: 16
base_num_kv_heads: 16
base_mlp_dim: 7168
base_num_decoder_layers: 16
head_dim: 128
mlp_activations: ["silu", "linear"]
mlp_activations_limit: -1.0
logits_via_embedding: false
num_experts: 1
num_experts_per_tok: 1
sparse_matmul: true
capacity_factor: -1.0
ragged_buffer_factor: -1.0
base_moe_mlp_dim: -1
remat_policy: 'full'
decoder_layer_input: 'device'
query_proj: 'remat'
mlpwi_0: 'remat'
optimizer_memory_host_offload: false
attention: 'autoselected'
attention_type: 'global'
attention_bias: false
use_qk_norm: false
norm_topk_prob: false
attention_sink: false
mlp_bias: false
sliding_window_size: 0
vocab_size: 32_000
per_device_batch_size: 12.0
max_target_length: 2048
gradient_accumulation_steps: 1
opt_type: "adamw"
mu_dtype: ""
rope_type: "default"
rope_max_timescale: 10_000
num_pipeline_microbatches: -1
sa_block_q: 512
sa_block_kv: 512
sa_use_fused_bwd_kernel: false
dcn_data_parallelism: -1
dcn_fsdp_parallelism: 1
ici_data_parallelism: 1
ici_fsdp_parallelism: -1
ici_tensor_parallelism: 1
ici_expert_parallelism: 1
ici_pipeline_parallelism: 1
"""
