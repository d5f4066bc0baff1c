"""The reference models: their results, and the layout of their dims."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from tpudist.models import (
    MLP,
    ConvNet,
    ConvNetConfig,
    Transformer,
    TransformerConfig,
    next_token_nats,
)
from tpudist.models.parts.logical import constrain

SMALL = TransformerConfig(num_layers=3, embed_dim=16, num_heads=2, mlp_dim=24)
RULES = (
    ("batch", "fsdp"),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
)


def tokens(batch: int = 4, length: int = 12) -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(batch, length)).astype(np.uint8)


@functools.cache
def model_of(config: TransformerConfig) -> Transformer:
    return Transformer(config, rngs=nnx.Rngs(0))


def make(**changes) -> Transformer:
    """Returns a copy of a model, because making one takes a second."""
    return nnx.clone(model_of(dataclasses.replace(SMALL, **changes)))


# One compiled program instead of about a hundred single operations.
of_tokens = nnx.jit(next_token_nats)
logits_of = nnx.jit(lambda model, tokens: model(tokens))


def loss(model: Transformer, batch: np.ndarray) -> jax.Array:
    return next_token_nats(model, jnp.asarray(batch)).mean()


def inner_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2, 2), ("replica", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.slow
def test_a_transformer_predicts_every_byte_only_from_earlier_bytes():
    """A model that sees its target has a low loss but learns nothing."""
    model = make()
    batch = tokens()
    changed = batch.copy()
    changed[:, 8:] += 1
    before, after = (of_tokens(model, jnp.asarray(x)) for x in (batch, changed))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).all()


@pytest.mark.slow
def test_a_fresh_transformer_is_about_as_good_as_guessing():
    nats = of_tokens(make(), jnp.asarray(tokens()))
    assert nats.shape == (4, 11)
    assert abs(nats.mean() - np.log(256)) < 1


@pytest.mark.slow
def test_attention_depends_on_positions():
    """Without rotary positions, the order of the bytes before the last one would not matter."""
    model = make()
    forth, back = np.array([[1, 2, 3, 4, 9]]), np.array([[4, 3, 2, 1, 9]])
    of_forth, of_back = (logits_of(model, jnp.asarray(x)) for x in (forth, back))
    assert not np.allclose(of_forth[0, -1], of_back[0, -1])


@pytest.mark.slow
def test_a_bfloat16_model_keeps_float32_parameters():
    model = make(dtype="bfloat16")
    grads = nnx.grad(loss)(model, tokens())
    assert {x.dtype for x in jax.tree.leaves((nnx.state(model), grads))} == {jnp.dtype("float32")}
    assert model(jnp.asarray(tokens())).dtype == jnp.float32
    assert "bf16[" in str(jax.make_jaxpr(lambda x: model(x))(tokens()))
    exact = loss(make(), tokens())
    np.testing.assert_allclose(loss(model, tokens()), exact, rtol=0.02)


@pytest.mark.slow
def test_an_mlp_without_a_gate_has_one_matrix_less():
    model = make(gated=False)
    assert model.blocks.mlp_in.shape == (3, 1, 16, 24)
    assert jnp.isfinite(loss(model, tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("graph", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_models_train_in_graph_mode_and_in_tree_mode(graph):
    """Flax plans to change its default from graph mode to tree mode."""
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        model = Transformer(SMALL, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            value, grads = nnx.value_and_grad(loss)(model, tokens())
            optimizer.update(model, grads)
            return value

        losses = [step(model, optimizer) for _ in range(6)]
        assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 0}, "num_layers >= 1; got 0"),
        ({"embed_dim": 18, "num_heads": 4}, "Use a multiple of 8, such as 24"),
        ({"embed_dim": 6, "num_heads": 2}, "Use a multiple of 4, such as 8"),
    ],
)
def test_invalid_sizes_are_rejected(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **change)


@pytest.mark.slow
def test_every_dim_of_every_parameter_has_a_name():
    for model in (make(), MLP((3, 4, 2), rngs=nnx.Rngs(0))):
        for path, param in nnx.iter_graph(model):
            if isinstance(param, nnx.Param):
                names = param.get_metadata()["out_sharding"]
                assert len(names) == param.ndim, path
                assert all(names), path


@pytest.mark.slow
@pytest.mark.parametrize("rules", [RULES, pytest.param((), marks=pytest.mark.exhaustive)])
def test_parameters_and_their_slots_are_placed_by_the_rules(rules):
    """A dim without a rule is not split, so the rules need not cover every model."""
    with jax.set_mesh(inner_mesh()), nnx.logical_axis_rules(rules):
        model = Transformer(SMALL, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    want = (
        PartitionSpec(None, "fsdp", None, "tensor", None) if rules else PartitionSpec(*[None] * 5)
    )
    slots = nnx.to_pure_dict(nnx.state(optimizer.opt_state))[0]["mu"]
    for array in (model.blocks.attention_in[...], slots["blocks"]["attention_in"]):
        assert array.sharding.spec == want


def test_a_constraint_does_not_split_a_dim_that_does_not_divide():
    x = jnp.ones((3, 4))
    assert constrain(x, "batch", "mlp") is x  # no mesh
    with jax.set_mesh(inner_mesh()), nnx.logical_axis_rules(RULES):
        text = str(jax.make_jaxpr(lambda x: constrain(x, "batch", "mlp"))(x))
    assert "UNCONSTRAINED" in text  # 3 rows over fsdp=2
    assert "tensor" in text


def test_a_convnet_stores_statistics_in_training_and_uses_them_in_evaluation():
    model = ConvNet(ConvNetConfig(channels=4), rngs=nnx.Rngs(0))
    judge = nnx.jit(lambda model, x: model(x, training=False))
    train = nnx.jit(lambda model, x: model(x, training=True))
    images = jax.random.normal(jax.random.key(0), (6, 8, 8, 1))
    before = model.norm1.mean[...]
    assert judge(model, images).shape == (6, 10)
    np.testing.assert_array_equal(model.norm1.mean[...], before)
    train(model, images)
    assert (model.norm1.mean[...] != before).any()


@pytest.mark.slow
def test_padding_is_excluded_from_the_statistics_of_a_convnet():
    images = jax.random.normal(jax.random.key(0), (6, 8, 8, 1))
    padded = jnp.concatenate([images, 100 * jnp.ones((2, 8, 8, 1))])
    models = [ConvNet(ConvNetConfig(channels=4), rngs=nnx.Rngs(0)) for _ in range(2)]
    want = models[0](images, training=True)
    got = models[1](padded, training=True, example_mask=jnp.arange(8) < 6)
    np.testing.assert_allclose(want, got[:6], rtol=1e-4, atol=1e-5)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m, nnx.BatchStat)) for m in models), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_an_mlp_requires_two_dims():
    assert MLP((3, 5, 2), rngs=nnx.Rngs(0))(jnp.ones((7, 3))).shape == (7, 2)
    with pytest.raises(ValueError, match=r"input and output; got dims=\(3,\)"):
        MLP((3,), rngs=nnx.Rngs(0))
