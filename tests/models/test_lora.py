"""LoRA adapters: they are added to a model, trained separately, and merged."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpudist
from pretrained_folders import RECORDED, files_of, logits_of, values_of
from tpudist.models import (
    Transformer,
    TransformerConfig,
    load_pretrained,
    lora,
    next_token_loss,
    save_pretrained,
)

SMALL = TransformerConfig(vocabulary=48, num_layers=2, embed_dim=16, num_heads=2, mlp_dim=24)


@functools.cache
def model_of(config: TransformerConfig) -> Transformer:
    return Transformer(config, rngs=nnx.Rngs(0))


def make(**changes) -> Transformer:
    """Returns a copy of a model, because making one takes a second."""
    return nnx.clone(model_of(dataclasses.replace(SMALL, **changes)))


def abstract(**changes) -> Transformer:
    """Returns a model that has only shapes."""
    config = dataclasses.replace(SMALL, **changes)
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def step(model, optimizer, tokens):
    def loss_fn(model):
        return tpudist.compute_average_loss(next_token_loss(model, tokens).mean(axis=-1))

    of_adapters = nnx.DiffState(0, lora.LoRAParam)
    loss, grads = nnx.value_and_grad(loss_fn, argnums=of_adapters)(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.slow
def test_only_adapters_are_trained_and_the_merged_model_is_equivalent(tmp_path):
    """Runs on a mesh with bfloat16 weights, as a typical fine-tuning run does."""
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2}, devices=jax.devices()[:4])
    folder = RECORDED / "mistral"
    with strategy.scope():
        model = load_pretrained(folder, dtype="float32")
        plain = logits_of(model)
        assert lora.add(model, rank=3, alpha=6.0) is model
        np.testing.assert_array_equal(logits_of(model), plain)
        optimizer = strategy.create(
            lambda model: tpudist.Optimizer(optax.adam(0.02), model, wrt=lora.LoRAParam), model
        )
    a = model.blocks.q_proj_lora_a.get_raw_value()
    b = model.blocks.down_proj_lora_b.get_raw_value()
    assert (a.shape, b.shape) == ((2, 24, 3), (2, 3, 24))
    assert {shard.data.shape for shard in a.addressable_shards} == {(2, 12, 3)}
    before = values_of(model)
    tokens = np.random.default_rng(0).integers(48, size=(8, 13), dtype=np.int32)
    data = strategy.experimental_make_numpy_dataset(tokens).batch(8).repeat(5)
    losses = [
        float(strategy.reduce("sum", strategy.run(step, args=(model, optimizer, batch)), None))
        for batch in strategy.experimental_distribute_dataset(data)
    ]
    assert losses[-1] < losses[0] - 0.1
    changed = {name for name, x in values_of(model).items() if not np.array_equal(x, before[name])}
    assert changed == {name for name in before if "_lora_" in name}
    assert len(changed) == 2 * len(lora.TARGETS)
    trained = logits_of(model)
    with strategy.scope():
        assert lora.merge(model) is model
    assert "_lora_" not in "".join(values_of(model))
    np.testing.assert_allclose(logits_of(model), trained, rtol=0, atol=2e-5)
    assert abs(trained - plain).max() > 0.1
    save_pretrained(model, tmp_path, like=folder)
    written = load_pretrained(tmp_path, dtype="float32")
    for name, value in values_of(model).items():
        narrow = value.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(values_of(written)[name], narrow)
    assert files_of(tmp_path).keys() == files_of(folder).keys()


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_each_adapter_belongs_to_its_matrix(kv_heads):
    """If an adapter were merged into another matrix, the model would compute something else."""
    model = lora.add(make(num_kv_heads=kv_heads), rank=2)
    for key, target in zip(jax.random.split(jax.random.key(1), 7), lora.TARGETS, strict=True):
        b = getattr(model.blocks, f"{target}_lora_b")
        b[...] = 0.2 * jax.random.normal(key, b.shape)
    want = logits_of(model)
    np.testing.assert_allclose(logits_of(lora.merge(model)), want, rtol=0, atol=2e-5)
    assert abs(logits_of(make(num_kv_heads=kv_heads)) - want).max() > 0.1


@pytest.mark.slow
def test_an_mlp_without_a_gate_has_adapters():
    model = lora.add(make(gated=False), targets=["up_proj"])
    model.blocks.up_proj_lora_b[...] += 0.1
    want = logits_of(model)
    np.testing.assert_allclose(logits_of(lora.merge(model)), want, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_initial_values_are_drawn_from_the_given_rngs():
    first, second, again = (
        lora.add(make(), rngs=nnx.Rngs(seed)).blocks.q_proj_lora_a[...] for seed in (1, 2, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != second).any()
    assert jnp.abs(first).max() <= 16**-0.5


def test_matrices_without_adapters_are_rejected():
    with pytest.raises(
        ValueError,
        match="cannot add adapters to lm_head. Use some of the matrices of this .* q_proj, ",
    ):
        lora.add(abstract(), targets=["lm_head"])
    with pytest.raises(ValueError, match="adapters to nothing"):
        lora.add(abstract(), targets=[])
    with pytest.raises(ValueError, match="adapters to gate_proj"):
        lora.add(abstract(gated=False))
    with pytest.raises(ValueError, match="adapters to gate_proj, up_proj, down_proj"):
        lora.add(abstract(num_experts=2))
    with pytest.raises(ValueError, match="rank=0: the width"):
        lora.add(abstract(), rank=0)
    model = nnx.eval_shape(lambda: lora.add(make()))
    with pytest.raises(ValueError, match="already has adapters"):
        lora.add(model)
    with pytest.raises(ValueError, match="without adapters"):
        lora.merge(abstract())
