"""The in-place backward pass of an MLP computes the same gradients with less memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import tpudist
from tpudist.models import Transformer, TransformerConfig, next_token_nats
from tpudist.models.parts.activation import activate, activation_product
from tpudist.training.steps import make_train_step
from tpudist.xla import topology


def plain(branches, weight):
    return activate(*branches) @ weight


def arguments(length, num_branches=2, dtype="float32", batch=2, embed=8, mlp=24):
    keys = jax.random.split(jax.random.key(length), num_branches + 1)
    shapes = [(batch, length, mlp)] * num_branches + [(mlp, embed)]
    *branches, weight = (jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))
    return tuple(branches), weight


def gradients(function, branches, weight):
    """Returns the value, and the gradients with respect to each branch and the weight."""
    out, back = jax.vjp(function, branches, weight)
    upstream = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).astype(jnp.bfloat16)
    d_branches, d_weight = back(upstream.astype(out.dtype).reshape(out.shape))
    return [out, *d_branches, d_weight]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_branches", [1, 2])
@pytest.mark.parametrize(
    "length", [150, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 16, 131, 384))]
)
def test_values_and_gradients_match_the_plain_product(dtype, length, num_branches):
    """Covers lengths of one chunk, of several chunks, and lengths with no divisor.

    The reference uses float32: JAX rounds bfloat16 gradients more than once (jaxlib 0.12 on CPU).
    """
    args = arguments(length, num_branches, dtype)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    run = jax.jit(gradients, static_argnums=0)
    found, want = run(activation_product, *args), run(plain, *wide)
    for a, b in zip(found, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, dtype)
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize(("length", "num_pieces"), [(2048, 16), (150, 2), (131, 1)])  # a prime
def test_a_length_is_cut_into_chunks_whose_tensors_are_overwritten(length, num_pieces):
    step = jax.make_jaxpr(lambda *args: gradients(activation_product, *args))(*arguments(length))
    (loop,) = (x for x in step.eqns if x.primitive.name == "scan")
    assert loop.params["length"] == num_pieces
    body = str(loop.params["jaxpr"])
    assert body.count(f"f32[2,{length // num_pieces},24] = dynamic_slice") == 3
    assert body.count(f"f32[2,{length},24] = dynamic_update_slice") == 3


def of_blocks(product, x, weights):
    """Returns the gradient of rematerialized blocks, like the blocks of a transformer."""

    @jax.checkpoint
    def block(x, weights):
        gate, up, out = weights
        return x + product((x @ gate, x @ up), out), None

    def loss(x, weights):
        return jnp.square(jax.lax.scan(block, x, weights)[0].astype(jnp.float32)).mean()

    return jax.grad(loss, argnums=1)(x, weights)


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_tpu_needs_one_tensor_less_and_copies_none():
    devices = topology.devices("v5e:2x2")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    batch, length, embed, mlp, layers = 16, 2048, 512, 16384, 2
    shapes = ((embed, mlp), (embed, mlp), (mlp, embed))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    weights = [jax.ShapeDtypeStruct((layers, *s), jnp.bfloat16, sharding=whole) for s in shapes]
    x = jax.ShapeDtypeStruct((batch, length, embed), jnp.bfloat16, sharding=split)

    def compiled(product):
        return jax.jit(of_blocks, static_argnums=0).lower(product, x, weights).compile()

    here, usual = compiled(activation_product), compiled(plain)
    tensor = batch // 4 * length * mlp * 2
    saved = usual.memory_analysis().temp_size_in_bytes - here.memory_analysis().temp_size_in_bytes
    assert saved > 0.9 * tensor
    wide = rf"bf16\[{batch // 4},{length},{mlp}\]"
    lines = here.as_text().splitlines()
    wide_update = "fusion.*/while/body/(closed_call|eval_jaxpr)/dynamic_update_slice"
    overwriting = [x for x in lines if re.search(wide_update, x)]
    # Each loop updates one tensor in place: with several, one may read what another overwrites.
    assert [len(re.findall(wide, x.split(" fusion(")[0])) for x in overwriting] == [1, 1, 1]
    assert not [x for x in lines if re.search(rf"= {wide}\S* copy\(", x)]


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.parametrize(("axes", "num_overwritten"), [({"fsdp": 4}, 3), ({"sequence": 4}, 0)])
def test_a_transformer_on_tpu_overwrites_unless_an_axis_splits_its_sequence(axes, num_overwritten):
    """XLA would gather a split sequence in order to cut it into chunks."""
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=topology.devices("v5e:2x2"))
    config = TransformerConfig(
        vocabulary=256, num_layers=2, embed_dim=256, num_heads=2, mlp_dim=768, dtype="bfloat16"
    )
    model = strategy.create_abstract(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    optimizer = strategy.create_abstract(lambda m: tpudist.Optimizer(optax.sgd(0.5), m), model)
    step = make_train_step(lambda model, batch: next_token_nats(model, batch).mean(axis=-1))
    batch = tpudist.PerReplica(jax.ShapeDtypeStruct((1, 4, 1025), jnp.int32))
    program = strategy.lower(step, args=(model, optimizer, batch)).as_text()
    overwritten = [
        line
        for line in program.splitlines()
        if "stablehlo.dynamic_update_slice" in line and "128x768xbf16" in line
    ]
    assert len(overwritten) == num_overwritten
