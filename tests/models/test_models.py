"""The reference models by themselves: what they compute, and how their dims are laid out."""

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


def loss(model: Transformer, batch: np.ndarray) -> jax.Array:
    return next_token_nats(model, jnp.asarray(batch)).mean()


def inner_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2, 2), ("replica", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def test_a_transformer_predicts_every_byte_from_those_before_it_alone():
    """A model that sees what it is to predict has a fine loss and learns nothing."""
    model = Transformer(SMALL, rngs=nnx.Rngs(0))
    batch = tokens()
    changed = batch.copy()
    changed[:, 8:] += 1
    before, after = (next_token_nats(model, jnp.asarray(x)) for x in (batch, changed))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).all()


def test_a_fresh_transformer_is_about_as_good_as_guessing():
    nats = next_token_nats(Transformer(SMALL, rngs=nnx.Rngs(0)), jnp.asarray(tokens()))
    assert nats.shape == (4, 11)
    assert abs(nats.mean() - np.log(256)) < 1


def test_attention_knows_positions():
    """Without rotary positions the order of the bytes before the last would not matter."""
    model = Transformer(SMALL, rngs=nnx.Rngs(0))
    forth, back = np.array([[1, 2, 3, 4, 9]]), np.array([[4, 3, 2, 1, 9]])
    assert not np.allclose(model(jnp.asarray(forth))[0, -1], model(jnp.asarray(back))[0, -1])


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_no_gradient(remat):
    plain = Transformer(SMALL, rngs=nnx.Rngs(0))
    again = Transformer(dataclasses.replace(SMALL, remat=remat), rngs=nnx.Rngs(0))
    want, got = (nnx.grad(loss)(model, tokens()) for model in (plain, again))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        nnx.to_pure_dict(want),
        nnx.to_pure_dict(got),
    )


@pytest.mark.slow
def test_bfloat16_computes_in_it_and_keeps_float32_parameters():
    model = Transformer(dataclasses.replace(SMALL, dtype="bfloat16"), rngs=nnx.Rngs(0))
    grads = nnx.grad(loss)(model, tokens())
    assert {x.dtype for x in jax.tree.leaves((nnx.state(model), grads))} == {jnp.dtype("float32")}
    assert model(jnp.asarray(tokens())).dtype == jnp.float32
    assert "bf16[" in str(jax.make_jaxpr(lambda x: model(x))(tokens()))
    exact = loss(Transformer(SMALL, rngs=nnx.Rngs(0)), tokens())
    np.testing.assert_allclose(loss(model, tokens()), exact, rtol=0.02)


def test_a_plain_mlp_has_one_matrix_less():
    model = Transformer(dataclasses.replace(SMALL, gated=False), rngs=nnx.Rngs(0))
    assert model.blocks.mlp_in.shape == (3, 1, 16, 24)
    assert jnp.isfinite(loss(model, tokens()))


@pytest.mark.parametrize("graph", [True, False])
def test_models_learn_in_graph_mode_and_in_tree_mode(graph):
    """Flax is about to change its default from the one to the other."""
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
def test_sizes_that_make_no_model_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **change)


def test_every_dim_of_every_parameter_has_a_name():
    for model in (Transformer(SMALL, rngs=nnx.Rngs(0)), MLP((3, 4, 2), rngs=nnx.Rngs(0))):
        for path, param in nnx.iter_graph(model):
            if isinstance(param, nnx.Param):
                names = param.get_metadata()["out_sharding"]
                assert len(names) == param.ndim, path
                assert all(names), path


@pytest.mark.parametrize("rules", [RULES, ()])
def test_parameters_and_their_slots_are_laid_out_by_the_rules(rules):
    """A name without a rule is not split: the rules need not know every model."""
    with jax.set_mesh(inner_mesh()), nnx.logical_axis_rules(rules):
        model = Transformer(SMALL, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    want = (
        PartitionSpec(None, "fsdp", None, "tensor", None) if rules else PartitionSpec(*[None] * 5)
    )
    slots = nnx.to_pure_dict(nnx.state(optimizer.opt_state))[0]["mu"]
    for array in (model.blocks.attention_in[...], slots["blocks"]["attention_in"]):
        assert array.sharding.spec == want


@pytest.mark.slow
def test_inside_a_replica_the_split_model_computes_what_the_whole_one_does():
    """XLA aborts the process on some lookups split like this: the model must avoid them."""
    batch = tokens()

    def with_gradients(graph, state):
        return jax.value_and_grad(lambda state: loss(nnx.merge(graph, state), batch))(state)

    want = with_gradients(*nnx.split(Transformer(SMALL, rngs=nnx.Rngs(0))))
    mesh = inner_mesh()
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        graph, state = nnx.split(Transformer(SMALL, rngs=nnx.Rngs(0)))
        replica = functools.partial(with_gradients, graph)
        everywhere = PartitionSpec()
        got = jax.jit(
            jax.shard_map(
                replica,
                mesh=mesh,
                in_specs=everywhere,
                out_specs=everywhere,
                axis_names={"replica"},
                check_vma=False,
            )
        )(state)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_a_constraint_leaves_alone_what_it_cannot_split():
    x = jnp.ones((3, 4))
    assert constrain(x, "batch", "mlp") is x  # no mesh
    with jax.set_mesh(inner_mesh()), nnx.logical_axis_rules(RULES):
        text = str(jax.make_jaxpr(lambda x: constrain(x, "batch", "mlp"))(x))
    assert "UNCONSTRAINED" in text  # 3 rows over fsdp=2
    assert "tensor" in text


def test_a_convnet_remembers_statistics_of_training_and_uses_them_in_judging():
    model = ConvNet(ConvNetConfig(channels=4), rngs=nnx.Rngs(0))
    images = jax.random.normal(jax.random.key(0), (6, 8, 8, 1))
    before = model.norm1.mean[...]
    assert model(images, training=False).shape == (6, 10)
    np.testing.assert_array_equal(model.norm1.mean[...], before)
    model(images, training=True)
    assert (model.norm1.mean[...] != before).any()


def test_padding_does_not_count_in_the_statistics_of_a_convnet():
    images = jax.random.normal(jax.random.key(0), (6, 8, 8, 1))
    padded = jnp.concatenate([images, 100 * jnp.ones((2, 8, 8, 1))])
    models = [ConvNet(ConvNetConfig(channels=4), rngs=nnx.Rngs(0)) for _ in range(2)]
    want = models[0](images, training=True)
    got = models[1](padded, training=True, example_mask=jnp.arange(8) < 6)
    np.testing.assert_allclose(want, got[:6], rtol=1e-4, atol=1e-5)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m, nnx.BatchStat)) for m in models), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_an_mlp_needs_two_dims():
    assert MLP((3, 5, 2), rngs=nnx.Rngs(0))(jnp.ones((7, 3))).shape == (7, 2)
    with pytest.raises(ValueError, match=r"input and output at least; got dims=\(3,\)"):
        MLP((3,), rngs=nnx.Rngs(0))
