"""Options of the reference transformer: each preserves the result or gives a known model."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import tpudist
from tpudist.models import Transformer, TransformerConfig, next_token_loss, next_token_nats
from tpudist.planner import GlobalBatch, model_flops

SMALL = TransformerConfig(
    vocabulary=64, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24
)
# meta-llama/Llama-3.1-8B, config.json
LLAMA_8B = TransformerConfig(
    vocabulary=128_256,
    num_layers=32,
    embed_dim=4096,
    num_heads=32,
    num_kv_heads=8,
    head_width=128,
    mlp_dim=14336,
    rotary_base=500_000.0,
    dtype="bfloat16",
)
RULES = (
    ("batch", "fsdp"),
    ("embed", "fsdp"),
    ("sequence", "sequence"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
)


@functools.cache
def model_of(config: TransformerConfig) -> Transformer:
    return Transformer(config, rngs=nnx.Rngs(0))


def make(config: TransformerConfig = SMALL, **changes) -> Transformer:
    """Returns a copy of a model, because making one takes a second."""
    return nnx.clone(model_of(dataclasses.replace(config, **changes)))


def make_here(**changes) -> Transformer:
    """Returns a model that is split by the current mesh and rules."""
    return Transformer(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))


def tokens(batch: int = 4, length: int = 16) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (batch, length + 1), 0, SMALL.vocabulary)


def trained(model: Transformer, function=next_token_nats):
    """Returns the nats of the tokens, and the gradients of their mean."""
    graph, state = nnx.split(model)

    def loss(state):
        nats = function(nnx.merge(graph, state), tokens())
        return nats.mean(), nats

    gradients, nats = jax.jit(jax.grad(loss, has_aux=True))(state)
    return nats, nnx.to_pure_dict(gradients)


@functools.cache
def plain():
    """Returns the result of the small model without any options."""
    return trained(make())


def assert_same(got, want, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want
    )


def num_parameters(config: TransformerConfig) -> int:
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_llama_has_the_published_number_of_parameters():
    assert num_parameters(LLAMA_8B) == 8_030_261_248


@pytest.mark.slow
def test_shared_keys_match_repeated_keys():
    shared, own = make(), make(num_kv_heads=None)
    query, key_value = shared.blocks.query_in[...], shared.blocks.key_value_in[...]
    key, value = jnp.moveaxis(jnp.repeat(key_value, 2, axis=3), 2, 0)
    own.blocks.attention_in[...] = jnp.stack((query, key, value), axis=2)
    for name in ("attention_out", "mlp_in", "mlp_out"):
        getattr(own.blocks, name)[...] = getattr(shared.blocks, name)[...]
    own.embedding[...], own.unembedding[...] = shared.embedding[...], shared.unembedding[...]
    assert_same(next_token_nats(shared, tokens()), next_token_nats(own, tokens()))


@pytest.mark.slow
def test_heads_may_be_wider_than_the_embedding_divided_by_heads():
    model = make(head_width=10)
    assert model.blocks.query_in.shape == (2, 16, 4, 10)
    assert model.blocks.key_value_in.shape == (2, 16, 2, 2, 10)
    assert jnp.isfinite(next_token_nats(model, tokens())).all()


@pytest.mark.slow
def test_a_tied_model_predicts_with_its_embedding():
    model = make(tied=True)
    assert not hasattr(model, "unembedding")
    nats, gradients = trained(model)
    assert abs(nats.mean() - math.log(SMALL.vocabulary)) < 1
    assert jnp.abs(gradients["embedding"]).sum(axis=1).min() > 0  # also for tokens never read


@pytest.mark.slow
def test_the_loss_and_its_gradient_match_optax_cross_entropy():
    def by_optax(model, tokens):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])

    assert_same(plain(), trained(make(), by_optax))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [4, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_a_chunked_loss_is_the_same_loss(chunk):
    assert_same(trained(make(loss_chunk=chunk)), plain())


def test_a_chunked_loss_has_the_same_flops():
    """Recomputation in its backward pass does not count."""

    def flops(model):
        graph, state = nnx.split(model)
        loss = lambda state: next_token_nats(nnx.merge(graph, state), tokens()).mean()  # noqa: E731
        return model_flops.model_flops(jax.make_jaxpr(jax.value_and_grad(loss))(state), 1)

    assert flops(make(loss_chunk=4)) == flops(make())


@pytest.mark.slow
def test_sharding_annotations_have_no_effect_outside_all_scopes():
    """There, one device has the whole model."""
    strategy = tpudist.get_strategy()
    made = [
        strategy.create(lambda: Transformer(SMALL, rngs=nnx.Rngs(0))),
        strategy.create_abstract(lambda: Transformer(SMALL, rngs=nnx.Rngs(0))),
    ]
    for model in made:
        assert {x.sharding.num_devices for x in jax.tree.leaves(nnx.state(model))} == {1}
    assert_same(trained(made[0]), plain())


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_a_chunked_loss_sends_at_most_the_bytes_of_a_full_one(axes):
    """The weight is gathered once, and its gradients are summed over devices once."""
    sent = {}
    for chunk in (None, 4):
        strategy = tpudist.TPUStrategy(replica_axes=axes, devices=jax.devices()[:4])
        config = dataclasses.replace(SMALL, vocabulary=512, num_layers=1, loss_chunk=chunk)
        model = strategy.create_abstract(lambda c=config: Transformer(c, rngs=nnx.Rngs(0)))

        def step(model, tokens):
            return nnx.grad(lambda model: next_token_nats(model, tokens).mean())(model)

        batch = GlobalBatch(jax.ShapeDtypeStruct((8, 17), jnp.int32))
        plan = strategy.plan(step, (model, batch), cache=False)
        sent[chunk] = sum(use.sent_bytes for use in plan.collectives)
    assert 0 < sent[4] <= sent[None]


@pytest.mark.slow
def test_chunks_that_do_not_divide_the_sequence_are_rejected():
    with pytest.raises(ValueError, match="loss_chunk=5 does not cut a sequence of 16 positions"):
        next_token_nats(make(loss_chunk=5), tokens())


@pytest.mark.slow
def test_a_chunked_loss_stores_the_logits_of_only_one_chunk():
    def temporary_bytes(**changes):
        model = nnx.eval_shape(lambda: make_here(vocabulary=32_768, num_layers=1, **changes))
        graph, state = nnx.split(model)

        def loss(state):
            return next_token_nats(nnx.merge(graph, state), tokens(4, 256)).mean()

        return jax.jit(jax.grad(loss)).lower(state).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * 256 * 32_768 * 4
    assert temporary_bytes() - temporary_bytes(loss_chunk=32) > 1.5 * logits


@pytest.mark.slow
def test_the_balance_of_experts_counts_only_in_the_training_loss():
    assert_same(next_token_loss(make(), tokens()), next_token_nats(make(), tokens()))
    model = make(num_experts=4, mlp_dim=8)
    more = next_token_loss(model, tokens()) - next_token_nats(model, tokens())
    assert (more > 0).all()
    assert (more < 0.01 * 3).all()  # as if all tokens used one expert


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "changes"),
    [
        ({"sequence": 4}, {}),
        ({"sequence": 4}, {"loss_chunk": 8}),
        ({"fsdp": 2, "tensor": 2}, {"loss_chunk": 4}),
        ({"fsdp": 2, "sequence": 2}, {"remat": "save_attention"}),
        ({"tensor": 4}, {}),
        ({"sequence": 2, "tensor": 2}, {"tied": True, "attention": "dot_product"}),
    ],
    ids=str,
)
def test_a_model_split_inside_a_replica_matches_the_unsplit_model(inner, changes):
    """This includes positions: each device rotates by the place of its part in the sequence."""
    want = trained(make(**changes))
    shape = {"replica": 8 // math.prod(inner.values())} | inner
    kinds = (AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=kinds)
    # Two key heads are not split over four devices: their rule is omitted.
    few = {"kv_heads"} if inner.get("tensor", 1) > 2 else set()
    rules = [(name, axis) for name, axis in RULES if axis in inner and name not in few]
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        graph, state = nnx.split(make_here(**changes))

        def replica(state):
            return trained(nnx.merge(graph, state))

        got = jax.jit(
            jax.shard_map(
                replica,
                mesh=mesh,
                in_specs=PartitionSpec(),
                out_specs=PartitionSpec(),
                axis_names={"replica"},
                check_vma=False,
            )
        )(state)
    assert_same(got, want, tolerance=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_kv_heads": 3}, r"do not share num_kv_heads=3 keys and values equally.*\[1, 2, 4\]"),
        ({"num_kv_heads": 0}, "num_kv_heads >= 1; got 0"),
        ({"head_width": 7}, "head_width=7 is odd, but rotary positions turn pairs of dims. Use 8"),
        ({"embed_dim": 18, "head_width": None}, "or pass head_width"),
        ({"loss_chunk": 0}, "loss_chunk >= 1; got 0"),
        ({"splash_block": 0}, "splash_block >= 1; got 0"),
        ({"remat": "some"}, "remat='some' is not a policy"),
    ],
)
def test_invalid_sizes_are_rejected(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **change)


FAMILY = dataclasses.replace(  # all options of pretrained models
    SMALL,
    gelu=True,
    biased=True,
    norm_offset=True,
    norm_outputs=True,
    norm_heads=True,
    attention_cap=2.0,
    output_cap=3.0,
    attention_window=5,
    layers_with_window=(True, False),
    local_rotary_base=50.0,
    embedding_scale=4.0,
    query_scale=0.4,
)


@functools.cache
def plain_family():
    return trained(make(FAMILY))


@pytest.mark.slow
def test_chunked_logits_are_capped_like_full_logits():
    """The gradient of the chunked loss is custom."""
    assert_same(trained(make(FAMILY, loss_chunk=4)), plain_family())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        ({"fsdp": 2, "tensor": 2}, {"remat": "full", "loss_chunk": 8}),
        ({"stage": 2, "fsdp": 2}, {"pipeline_stages": 2}),
    ],
    ids=str,
)
def test_a_model_with_all_pretrained_options_matches_on_a_mesh(axes, changes):
    want, of_mean = plain_family()
    config = dataclasses.replace(FAMILY, **changes)
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=jax.devices()[:4])
    model = strategy.create(lambda: Transformer(config, rngs=nnx.Rngs(0)))

    def step(model, tokens):
        def loss(model):
            nats = next_token_nats(model, tokens)
            return nats.mean(), nats

        (_, nats), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        return nats, grads

    nats, grads = strategy.run(step, args=(model, tokens()))
    assert_same(nats, want)
    assert_same(nnx.to_pure_dict(grads), of_mean)
