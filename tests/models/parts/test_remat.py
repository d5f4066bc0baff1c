"""Rematerialization policies: all give the same gradients, at different costs of memory."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import tpudist
from tpudist.models import Transformer, TransformerConfig, next_token_nats
from tpudist.models.parts import remat
from tpudist.programs import equation_layouts
from tpudist.training.steps import make_train_step
from tpudist.xla import topology

SMALL = TransformerConfig(
    num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24, remat="none"
)
WRITTEN_OUT = "save:query,key+offload:mlp_in"


def test_minimal_policies_keep_the_tensors_of_maxtext():
    """By MaxText's names: query_proj, key_proj, value_proj, out_proj, mlpwi and mlpwo."""
    tensors = {"query", "key", "value", "attention_out", "mlp_in", "mlp_out"}
    assert set(remat.parse("minimal").saved) == tensors
    assert set(remat.parse("minimal_offloaded").offloaded) == tensors
    assert set(remat.parse("minimal_with_context").saved) == tensors | {"attention"}
    assert not remat.parse("minimal").offloaded + remat.parse("minimal_offloaded").saved


def test_a_policy_can_be_written_out():
    assert remat.parse("full") == remat.Policy()
    assert remat.parse(WRITTEN_OUT) == remat.Policy(("query", "key"), ("mlp_in",))
    assert remat.parse("save: query , value").saved == ("query", "value")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("some", r"'some' is not a policy. Use one of none, full, .*save:query,key\+offload"),
        ("keep:query", "'keep:query' is not a policy"),
        ("save", "'save' is not a policy"),
        ("save:query,cheese", "mentions 'cheese', which no block has.*layer_input, query"),
        ("save:", "mentions '', which no block has"),
        ("save:query+offload:query", "mentions query twice.*mention it once"),
    ],
)
def test_an_invalid_policy_is_rejected(text, words):
    with pytest.raises(ValueError, match=words):
        remat.parse(text)


def test_offloading_without_host_memory_is_rejected():
    with pytest.raises(
        ValueError,
        match="moves query, key, value to host memory, which JAX does not support on platform",
    ):
        remat.apply(lambda x: x, "offload_qkv", platform="METAL")
    assert callable(remat.apply(lambda x: x, "save_qkv", platform="METAL"))


@pytest.mark.parametrize("attention", ["dot_product", "splash", "ring"])
def test_every_tensor_of_the_policies_is_named_in_a_block(attention):
    config = dataclasses.replace(SMALL, attention=attention)

    def nats_of_a_new_model(tokens):
        return next_token_nats(Transformer(config, rngs=nnx.Rngs(0)), tokens)

    text = str(jax.make_jaxpr(nats_of_a_new_model)(jnp.zeros((1, 9), jnp.int32)))
    for name in remat.NAMES:
        assert f"name[name={name}]" in text


@pytest.mark.parametrize("attention", ["dot_product", "splash", "ring"])
def test_a_gathered_tensor_of_attention_is_saved_once(attention):
    """It must not be saved both as the result and for attention's own backward pass."""
    config = dataclasses.replace(
        SMALL, num_kv_heads=None, head_width=8, attention=attention, remat="save_attention"
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    tokens = jnp.zeros((1, 129), jnp.int32)
    grad = jax.grad(lambda state: next_token_nats(nnx.merge(graph, state), tokens).sum())
    layers = next(x for x in jax.make_jaxpr(grad)(state).eqns if x.primitive.name == "scan")
    kept = [x.aval.shape for x in layers.outvars[equation_layouts.structure_of(layers).num_carry :]]
    size = config.num_layers * 128 * config.num_heads * config.head_dim
    assert len([shape for shape in kept if math.prod(shape) == size]) == 1, kept


def step_of(policy: str, devices, **changes):
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2}, devices=devices)
    config = dataclasses.replace(SMALL, remat=policy, **changes)
    step = make_train_step(lambda model, batch: next_token_nats(model, batch).mean(axis=-1))
    return strategy, config, step


@functools.cache
def losses(policy: str) -> list[float]:
    """Returns the losses of three steps on a replica of two devices."""
    strategy, config, step = step_of(policy, jax.devices()[:2])
    model = strategy.create(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    tx = optax.sgd(0.5)
    optimizer = strategy.create(lambda model: tpudist.Optimizer(tx, model), model)
    batch = np.random.default_rng(0).integers(256, size=(8, 17))
    (distributed,) = strategy.experimental_distribute_dataset([batch])
    return [float(strategy.run(step, args=(model, optimizer, distributed))) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "dots", "minimal", "offload_projections", WRITTEN_OUT])
def test_policies_of_every_kind_train_equally(policy):
    want = losses("none")
    assert want[-1] < want[0]
    np.testing.assert_allclose(losses(policy), want, rtol=1e-5)


@functools.cache
def compiled_for_a_tpu(policy: str) -> jax.stages.Compiled:
    size = {"num_layers": 4, "embed_dim": 256, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 1024}
    devices = topology.devices("v5e:2x2")
    strategy, config, step = step_of(policy, devices, dtype="bfloat16", **size)
    model = strategy.create_abstract(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    tx = optax.sgd(0.5)
    optimizer = strategy.create_abstract(lambda model: tpudist.Optimizer(tx, model), model)
    where = NamedSharding(strategy.mesh, PartitionSpec("replica", "fsdp"))
    batch = jax.ShapeDtypeStruct((2, 16, 1025), jnp.int32, sharding=where)
    lowered = strategy.lower(step, args=(model, optimizer, tpudist.PerReplica(batch)))
    return lowered.compile()


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.parametrize(
    ("dear", "cheap"),
    [
        ("none", "minimal_with_context"),
        ("minimal_with_context", "minimal"),
        ("minimal", "save_mlp"),
        ("save_mlp", "full"),
        ("minimal", "offload_qkv"),
    ],
)
def test_a_cheaper_policy_needs_less_memory_on_a_tpu(dear, cheap):
    programs = [compiled_for_a_tpu(policy) for policy in (dear, cheap)]
    more, less = (x.memory_analysis() for x in programs)
    assert more.temp_size_in_bytes > less.temp_size_in_bytes
    offloads = cheap.startswith("offload")
    assert ["S(5)" in x.as_text() for x in programs] == [False, offloads]  # host memory, for XLA
    assert (less.host_temp_size_in_bytes > 0) == offloads
