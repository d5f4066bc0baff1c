"""Weights are saved in the files they were loaded from, or in files that others can read."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import tpudist
from pretrained_folders import (
    NAMES,
    ONLY_LIKE,
    RECORDED,
    files_of,
    logits_of,
    recorded_logits,
    values_of,
)
from tpudist.models import (
    Transformer,
    TransformerConfig,
    load_pretrained,
    lora,
    read_config,
    save_pretrained,
)
from tpudist.models.pretrained.config_export import differences

SMALL = TransformerConfig(
    vocabulary=48, num_layers=2, embed_dim=24, num_heads=4, num_kv_heads=2, mlp_dim=40
)


def make(**changes) -> Transformer:
    return Transformer(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))


def abstract(**changes) -> Transformer:
    """Returns a model that has only shapes."""
    return nnx.eval_shape(lambda: make(**changes))


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_model_is_saved_with_the_same_bytes(name, tmp_path):
    save_pretrained(load_pretrained(RECORDED / name), tmp_path, like=RECORDED / name)
    assert files_of(tmp_path) == files_of(RECORDED / name)


def test_the_bytes_are_the_same_for_any_geometry(tmp_path):
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2, "tensor": 2})
    with strategy.scope():
        model = load_pretrained(RECORDED / "qwen3", dtype="float32")
    save_pretrained(model, tmp_path, like=RECORDED / "qwen3")
    assert files_of(tmp_path) == files_of(RECORDED / "qwen3")


def test_a_model_may_overwrite_its_own_folder(tmp_path):
    save_pretrained(load_pretrained(RECORDED / "llama"), tmp_path, like=RECORDED / "llama")
    model = load_pretrained(tmp_path)
    model.final_norm[...] += 1
    save_pretrained(model, tmp_path, like=tmp_path)
    assert files_of(tmp_path).keys() == files_of(RECORDED / "llama").keys()
    for name, value in values_of(load_pretrained(tmp_path)).items():
        np.testing.assert_array_equal(value, values_of(model)[name])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=() if x == "llama_yarn" else pytest.mark.exhaustive)
        for x in NAMES
        if x not in ONLY_LIKE
    ],
)
def test_a_saved_configuration_describes_the_same_model(name, tmp_path):
    """Also covers saving without the original folder."""
    save_pretrained(load_pretrained(RECORDED / name), tmp_path)
    assert differences(read_config(tmp_path), read_config(RECORDED / name)) == ()
    for key, value in values_of(load_pretrained(tmp_path)).items():
        np.testing.assert_array_equal(value, values_of(load_pretrained(RECORDED / name))[key])


@pytest.mark.parametrize("name", ONLY_LIKE)
def test_other_families_are_saved_only_like_their_folder(name, tmp_path):
    """`test_a_loaded_model_is_saved_with_the_same_bytes` saves them like their folder."""
    with pytest.raises(ValueError, match=r"can be saved like its folder: save_pretrained\(model"):
        save_pretrained(load_pretrained(RECORDED / name), tmp_path)


@pytest.mark.slow
def test_a_new_model_is_saved_in_files_of_bounded_size(tmp_path):
    model = make()
    save_pretrained(model, tmp_path, dtype="bfloat16", max_file_bytes=10_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    assert len(files) > 2
    tensors = {name: t for f in files for name, t in safetensors.numpy.load_file(f).items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    # `max_file_bytes` limits the tensors; a file also has a header.
    assert max(file.stat().st_size for file in files) < 12_000
    mlp = tensors["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(mlp.T, model.blocks.mlp_in[1, 1].astype(jnp.bfloat16))
    again = load_pretrained(tmp_path)
    assert (again.config.dtype, again.embedding.dtype) == ("bfloat16", jnp.bfloat16)
    save_pretrained(model, tmp_path)  # one file, which makes the index obsolete
    assert load_pretrained(tmp_path).embedding.dtype == jnp.float32


@pytest.mark.slow
def test_files_of_an_earlier_save_do_not_replace_a_later_save(tmp_path):
    first, last = make(), make(mlp_dim=48)
    original = tmp_path / "original"
    save_pretrained(last, original)
    for bytes_of_first, bytes_of_last in ((10**9, 10_000), (10_000, 10**9)):
        folder = tmp_path / str(bytes_of_first)
        save_pretrained(first, folder, max_file_bytes=bytes_of_first)
        save_pretrained(last, folder, max_file_bytes=bytes_of_last)
        assert load_pretrained(folder).config.mlp_dim == 48
        both = (folder / "model.safetensors", folder / "model.safetensors.index.json")
        assert sum(file.exists() for file in both) == 1
    folder = tmp_path / "like"
    save_pretrained(first, folder, max_file_bytes=10_000)
    save_pretrained(last, folder, like=original)
    assert load_pretrained(folder).config.mlp_dim == 48


@pytest.mark.slow
def test_two_sets_of_weights_in_a_folder_are_rejected(tmp_path):
    save_pretrained(make(), tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    save_pretrained(make(), tmp_path, max_file_bytes=10_000)
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(
        ValueError, match=r"holds both model\.safetensors and .*Remove the wrong one"
    ):
        load_pretrained(tmp_path)


def test_a_model_that_no_family_supports_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="No family .*nearest is 'llama', .* output_scale.*Train"):
        save_pretrained(abstract(tied=True), tmp_path)
    with pytest.raises(ValueError, match="differs in gated"):
        save_pretrained(abstract(gated=False), tmp_path)
    with pytest.raises(ValueError, match="differs in num_experts"):
        save_pretrained(abstract(num_experts=2), tmp_path)
    with pytest.raises(ValueError, match="cannot contain parameters of dtype int8"):
        save_pretrained(abstract(), tmp_path, dtype="int8")
    with pytest.raises(ValueError, match="differs from the model in that folder in num_layers"):
        save_pretrained(abstract(num_layers=3), tmp_path, like=RECORDED / "mistral")
    with pytest.raises(ValueError, match="a model with adapters.*Merge them first"):
        save_pretrained(nnx.eval_shape(lambda: lora.add(make())), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_tied_model_without_a_scale_is_written_and_read(tmp_path):
    model = make(tied=True, output_scale=1.0)
    save_pretrained(model, tmp_path)
    np.testing.assert_array_equal(logits_of(load_pretrained(tmp_path)), logits_of(model))


def test_the_recorded_models_have_distinct_logits():
    """Otherwise a test that compares with the wrong model would pass."""
    for name in NAMES:
        assert recorded_logits(name).std() > 0.5
