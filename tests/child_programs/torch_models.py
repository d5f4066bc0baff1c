"""Tiny pretrained models of the package `transformers`, and the logits that it gives for them.

`python tests/child_programs/torch_models.py record FOLDER` writes a folder for each of `MODELS`:
its weights, its `config.json`, and `logits.npz`. `... logits FOLDER...` writes `logits.npz` to
folders that are there. Needs the extra `parity-torch`, and nothing of tpudist, so that it runs in
an environment of its own.
"""

import argparse
from pathlib import Path

import numpy as np

_SMALL = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 5, "num_hidden_layers": 3}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_OF_LAYERS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
    "partial_rotary_factor": 0.5,
}
# The class of the model, what it is, and its dtype in the file.
MODELS = {
    "llama": ("Llama", {"rope_parameters": _LLAMA3, "rms_norm_eps": 1e-3}, "float32"),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}, "bfloat16"),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        "bfloat16",
    ),
    "llama_dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
            "max_position_embeddings": 16,
        },
        "bfloat16",
    ),
    "llama_yarn": ("Llama", {"rope_parameters": _YARN}, "bfloat16"),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 8}, "bfloat16"),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        "float32",
    ),
    "qwen2_plain": ("Qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}, "float16"),
    "qwen3": ("Qwen3", {"head_dim": 10}, "bfloat16"),
    "gemma": ("Gemma", {"head_dim": 8}, "bfloat16"),
    "gemma2": (
        "Gemma2",
        _GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
        "bfloat16",
    ),
    "gemma3": (
        "Gemma3",
        _GEMMA
        | {
            "rope_parameters": _OF_LAYERS,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "bfloat16",
    ),
    "mixtral": ("Mixtral", _EXPERTS, "bfloat16"),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 8,
            "moe_intermediate_size": 20,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
        "bfloat16",
    ),
    "gpt_oss": (
        "GptOss",
        _EXPERTS
        | {
            "head_dim": 8,
            "sliding_window": 5,
            "swiglu_limit": 1.0,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": _YARN | {"truncate": False},
        },
        "bfloat16",
    ),
    "phi3": (
        "Phi3",
        {"sliding_window": 6, "original_max_position_embeddings": 16, "hidden_size": 32}
        | {"rope_parameters": _LONGROPE, "max_position_embeddings": 64},
        "bfloat16",
    ),
    "phi3_plain": ("Phi3", {"num_key_value_heads": 4, "tie_word_embeddings": True}, "bfloat16"),
    "olmo2": ("Olmo2", {"rms_norm_eps": 1e-3}, "bfloat16"),
    "gpt2": (
        "GPT2",
        {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 40},
        "bfloat16",
    ),
}
IN_TWO_FILES = "qwen3"


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(_SMALL["vocab_size"], size=(2, 24))


def make(name: str, seed: int):
    """One of the models in float32, with values that its file can hold and that all matter."""
    import torch
    import transformers

    kind, options, dtype = MODELS[name]
    of_text = "Text" if kind == "Gemma3" else ""
    small = _SMALL if kind != "GPT2" else {k: _SMALL[k] for k in _SMALL if k == "vocab_size"}
    config = getattr(transformers, f"{kind}{of_text}Config")(**(small | options))
    model = getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(
        config
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part, value in model.named_parameters():
            drawn = torch.randn(value.shape, generator=generator)
            if "norm" in part or "ln_" in part:
                offset = 0.0 if kind.startswith("Gemma") else 1.0
                drawn = offset + 0.3 * drawn
            elif "embed" in part and kind.startswith("Gemma"):
                drawn = 0.2 * drawn  # they are scaled where they enter
            else:
                drawn = drawn * (0.6 if "embed" in part else 0.22)
            value.copy_(drawn.to(getattr(torch, dtype)))
    return model.eval()


def logits_of(model) -> np.ndarray:
    import torch

    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(torch.tensor(tokens())).logits.numpy()


def record(folder: Path) -> None:
    import torch

    for seed, (name, (_, _, dtype)) in enumerate(MODELS.items()):
        model = make(name, seed)
        logits = logits_of(model)
        where = folder / name
        size = "25KB" if name == IN_TWO_FILES else "5GB"
        model.to(getattr(torch, dtype)).save_pretrained(where, max_shard_size=size)
        np.savez_compressed(where / "logits.npz", logits=logits)
        (where / "generation_config.json").unlink(missing_ok=True)


def write_logits(folders: list[Path]) -> None:
    import torch
    import transformers

    for folder in folders:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        np.savez_compressed(folder / "logits.npz", logits=logits_of(model.eval()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("record", "logits"))
    parser.add_argument("folders", nargs="+", type=Path)
    options = parser.parse_args()
    if options.what == "record":
        record(options.folders[0])
    else:
        write_logits(options.folders)
