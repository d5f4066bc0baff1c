"""A quantized model computes nearly the same, and can only be used for inference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpudist
from tpudist.models import Transformer, TransformerConfig, lora, next_token_nats, quantize
from tpudist.models.pretrained.saver import save_pretrained

SMALL = TransformerConfig(
    vocabulary=64, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, mlp_dim=96
)
TOKENS = jax.random.randint(jax.random.key(1), (4, 17), 0, SMALL.vocabulary)


def make(config=SMALL):
    return Transformer(config, rngs=nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True, "num_kv_heads": None, "gated": False},
        {"num_experts": 4, "mlp_dim": 32, "expert_method": "grouped"},
        {"num_experts": 4, "mlp_dim": 32, "loss_chunk": 8},
    ],
    ids=str,
)
def test_a_quantized_model_has_nearly_the_same_logits(changes):
    """A weight is off by 1/508 of the largest of its channel on average, and errors do not add."""
    config = dataclasses.replace(SMALL, **changes)
    model = make(config)
    logits, nats = model(TOKENS), next_token_nats(model, TOKENS).mean()
    assert quantize(model).blocks.mlp_out.dtype == jnp.int8
    got = model(TOKENS)
    assert jnp.std(got - logits) < 0.03 * jnp.std(logits)
    assert abs(next_token_nats(model, TOKENS).mean() - nats) < 0.01


@pytest.mark.slow
def test_a_model_may_be_quantized_while_it_is_created_on_a_mesh():
    strategy = tpudist.TPUStrategy(replica_axes={"tensor": 2}, devices=jax.devices()[:2])
    model = strategy.create(lambda: quantize(make()))
    assert model.blocks.mlp_in[...].sharding.spec[3] == "tensor"
    assert model.blocks.mlp_in_scale[...].sharding.spec[3] == "tensor"
    got = strategy.run(lambda model: model(TOKENS), (model,))
    np.testing.assert_allclose(got, quantize(make())(TOKENS), atol=1e-5)


def test_a_quantized_model_is_not_quantized_merged_or_saved(tmp_path):
    model = nnx.eval_shape(lambda: quantize(make()))
    for use in (quantize, lora.merge, lambda model: save_pretrained(model, tmp_path)):
        with pytest.raises(ValueError, match="received a model whose matrices are int8 already"):
            use(model)
