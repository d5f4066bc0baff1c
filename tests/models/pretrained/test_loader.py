"""Pretrained weights are loaded exactly, to their placement in a strategy, in little memory."""

import dataclasses
import json
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import tpudist
from places import ROOT
from pretrained_folders import NAMES, RECORDED, logits_of, recorded_logits, values_of
from processes import run_processes
from tpudist.models import (
    Transformer,
    TransformerConfig,
    load_pretrained,
    read_config,
    save_pretrained,
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=() if x in ("gemma3", "llama_yarn") else pytest.mark.exhaustive)
        for x in NAMES
    ],
)
def test_logits_match_transformers(name):
    model = load_pretrained(RECORDED / name, dtype="float32")
    np.testing.assert_allclose(logits_of(model), recorded_logits(name), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        ({"fsdp": 8}, {}),
        ({"fsdp": 2, "tensor": 2}, {}),
        ({"tensor": 2}, {}),
        ({"stage": 2, "fsdp": 4}, {"pipeline_stages": 2}),
    ],
    ids=str,
)
def test_each_device_has_its_part_for_any_geometry(axes, changes):
    folder = RECORDED / "qwen2"
    strategy = tpudist.TPUStrategy(replica_axes=axes)
    config = dataclasses.replace(read_config(folder), **changes)
    want = values_of(load_pretrained(folder))
    with strategy.scope():
        model = load_pretrained(folder, config=config)
    created = strategy.create_abstract(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    for variable, like in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(created)), strict=True
    ):
        assert variable.sharding == like.sharding
    found = values_of(model)
    assert found.keys() == want.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, want[name])


@pytest.mark.parametrize(
    "make",
    [
        tpudist.MirroredStrategy,
        tpudist.OneDeviceStrategy,
        tpudist.experimental.CentralStorageStrategy,
    ],
)
def test_a_loaded_model_can_be_trained_under_any_strategy(make):
    """Devices must not share the memory of the loader, or they overwrite each other's values."""
    strategy = make() if make is not tpudist.OneDeviceStrategy else make(jax.devices()[0])
    want = values_of(load_pretrained(RECORDED / "qwen2"))
    with strategy.scope():
        model = load_pretrained(RECORDED / "qwen2")

    def step(model):
        model.final_norm[...] += 1

    strategy.run(step, args=(model,))
    strategy.run(step, args=(model,))
    for name, value in values_of(model).items():
        np.testing.assert_array_equal(value, want[name] + 2 * (name == "final_norm"))


def test_parameters_have_the_stored_or_the_requested_dtype():
    folder = RECORDED / "gemma2"
    stored, wide = load_pretrained(folder), load_pretrained(folder, dtype=jnp.float32)
    assert stored.embedding.dtype == stored.blocks.mlp_in.dtype == jnp.bfloat16
    assert (stored.config.dtype, wide.config.dtype) == ("bfloat16", "float32")
    assert wide.embedding.dtype == jnp.float32
    for name, value in values_of(stored).items():
        np.testing.assert_array_equal(value.astype(np.float32), values_of(wide)[name])
    config = dataclasses.replace(read_config(folder), dtype="float32", remat="full")
    assert load_pretrained(folder, config=config).config.remat == "full"
    half = load_pretrained(RECORDED / "qwen2_plain")
    assert (half.embedding.dtype, half.config.dtype) == (jnp.float16, "float32")


def test_a_variable_has_the_widest_dtype_of_its_layers(tmp_path):
    folder = copy("llama", tmp_path)
    name = "model.layers.0.post_attention_layernorm.weight"
    rounded = values_of(load_pretrained(folder))["blocks.mlp_norm"][0].astype(np.float16)
    change_tensors(folder, **{name.replace(".", "__"): rounded})
    model = load_pretrained(folder)
    assert model.blocks.mlp_norm.dtype == jnp.float32
    want = values_of(load_pretrained(RECORDED / "llama"))["blocks.mlp_norm"].copy()
    want[0] = rounded
    np.testing.assert_array_equal(values_of(model)["blocks.mlp_norm"], want)


def test_loading_in_a_narrower_dtype_rounds():
    wide, narrow = (load_pretrained(RECORDED / "llama", dtype=d) for d in (None, "bfloat16"))
    for name, value in values_of(narrow).items():
        np.testing.assert_array_equal(value, values_of(wide)[name].astype(jnp.bfloat16))


def copy(name: str, folder):
    return shutil.copytree(RECORDED / name, folder / name)


def change_tensors(folder, **changes):
    """Replaces tensors, with `__` for dots; None removes a tensor."""
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    safetensors.numpy.save_file(tensors, file)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"config\.json does not exist.*tpudist downloads nothing"
    ):
        load_pretrained(tmp_path)
    folder = copy("qwen3", tmp_path)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"names 2 files, but 1 of them are missing: model-"
    ):
        load_pretrained(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match="holds neither model.safetensors nor"):
        load_pretrained(folder)


def test_damaged_files_are_rejected(tmp_path):
    folder = copy("llama", tmp_path)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(ValueError, match="is not a complete safetensors file.*Download it again"):
        load_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load_pretrained(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json holds a list, not an object"):
        load_pretrained(folder)


def test_tensors_of_a_different_model_are_rejected(tmp_path):
    folder = copy("llama", tmp_path)
    change_tensors(folder, model__norm__weight=None, model__extra=np.zeros(2, np.float32))
    needed = r"1 that it needs are missing: model\.norm\.weight; 1 are unknown: model\.extra"
    with pytest.raises(ValueError, match=needed):
        load_pretrained(folder)
    change_tensors(folder, model__norm__weight=np.zeros(3, np.float32), model__extra=None)
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight in .* is \[3\], but config.json requires \[24\]"
    ):
        load_pretrained(folder)
    change_tensors(folder, model__norm__weight=np.zeros(24, np.int8))
    with pytest.raises(ValueError, match="has dtype I8, but tpudist loads only F32, BF16, F16"):
        load_pretrained(folder)


def test_a_tied_model_may_contain_its_last_matrix_if_it_equals_the_embedding(tmp_path):
    folder = copy("qwen2_plain", tmp_path)
    embedding = safetensors.numpy.load_file(folder / "model.safetensors")
    embedding = embedding["model.embed_tokens.weight"]
    change_tensors(folder, lm_head__weight=embedding)
    model = load_pretrained(folder)
    save_pretrained(model, tmp_path / "again", like=folder)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()
    change_tensors(folder, lm_head__weight=embedding + 1)
    with pytest.raises(ValueError, match="tie_word_embeddings: true, but lm_head.weight differs"):
        load_pretrained(folder)


def test_unused_buffers_are_ignored(tmp_path):
    folder = copy("llama", tmp_path)
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    change_tensors(folder, **{name: np.zeros(3, np.float32)})
    model = load_pretrained(folder)
    save_pretrained(model, tmp_path / "again", like=folder)
    written = tmp_path / "again" / "model.safetensors"
    assert written.read_bytes() == (folder / "model.safetensors").read_bytes()


def test_unsupported_arguments_are_rejected():
    with pytest.raises(ValueError, match="dtype='int8'\\): dtype must be 'float32'"):
        load_pretrained(RECORDED / "llama", dtype="int8")
    with pytest.raises(ValueError, match="dtype='half'\\): dtype must be 'float32'"):
        load_pretrained(RECORDED / "llama", dtype="half")
    config = dataclasses.replace(read_config(RECORDED / "llama"), rotary_base=3.0)
    with pytest.raises(ValueError, match="differs from the config of the weights in rotary_base"):
        load_pretrained(RECORDED / "llama", config=config)


MEMORY = """
    import json, os, sys, threading, time
    import tpudist
    tpudist.emulate(8)
    import jax
    from tpudist.models import load_pretrained, read_config

    def anonymous_bytes():
        lines = open("/proc/self/status").read().splitlines()
        [line] = [line for line in lines if line.startswith("RssAnon")]
        return int(line.split()[1]) * 1024

    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 8})
    with strategy.scope():
        strategy.create(lambda: jax.numpy.zeros(8))
        before, most = anonymous_bytes(), [0]
        done = threading.Event()

        def watch():
            while not done.wait(0.001):
                most[0] = max(most[0], anonymous_bytes())

        watching = threading.Thread(target=watch, daemon=True)  # ends if loading raises
        watching.start()
        model = load_pretrained(sys.argv[1])
        done.set()
        watching.join()
    held = sum(x.nbytes for x in jax.live_arrays())
    print(json.dumps({"rise": max(most[0], anonymous_bytes()) - before, "held": held}))
"""


@pytest.mark.slow
def test_a_host_needs_the_memory_of_its_devices_and_less_than_one_tensor_more(tmp_path):
    config = TransformerConfig(
        vocabulary=24_000, num_layers=6, embed_dim=1024, num_heads=8, mlp_dim=4096, gated=True
    )
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    write_sparse(model, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    largest = 24_000 * 1024 * 2  # bytes of the embedding in bfloat16
    assert found["held"] > 5 * largest
    assert found["rise"] - found["held"] < largest


def write_sparse(model, folder):
    """Writes sparse files of zeros for a model, which use no disk space."""
    from tpudist.models.pretrained.config_export import make_config
    from tpudist.models.pretrained.safetensors_file import make_header
    from tpudist.models.pretrained.tensor_places import tensor_places

    places = list(tensor_places(model.config, "llama"))
    start = make_header((place.tensor, "BF16", place.shape) for place in places)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(start)
        file.truncate(len(start) + 2 * sum(int(np.prod(place.shape)) for place in places))
    (folder / "config.json").write_text(json.dumps(make_config(model.config, "bfloat16")))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_each_process_reads_its_part_and_the_first_writes_everything(tmp_path):
    program = """
        import sys
        import jax, tpudist
        from pathlib import Path
        from pretrained_folders import RECORDED, files_of
        from processes import report
        from tpudist.models import load_pretrained, save_pretrained

        tpudist.emulate()
        tpudist.MultiWorkerMirroredStrategy()
        strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 8})
        folder = Path(sys.argv[1])
        with strategy.scope():
            model = load_pretrained(RECORDED / "qwen2")
        array = model.blocks.mlp_in.get_raw_value()
        shapes = {str(shard.data.shape) for shard in array.addressable_shards}
        save_pretrained(model, folder, like=RECORDED / "qwen2")
        same = files_of(folder) == files_of(RECORDED / "qwen2")
        found = [same, array.is_fully_addressable, len(array.addressable_shards), sorted(shapes)]
        dtype = (None, "bfloat16")[jax.process_index()]
        try:
            with strategy.scope():
                load_pretrained(RECORDED / "qwen2", dtype=dtype)
        except tpudist.errors.ProcessesDifferError as error:
            report([*found, "dtype" in str(error) and "load_pretrained" in str(error)])
    """
    results = run_processes(program, args=[str(tmp_path / "out")])
    assert [r.result for r in results] == [[True, False, 4, ["(2, 2, 3, 40)"], True]] * 2
