"""Decoding with a cache has the logits of complete sequences, on one device and on meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpudist
from tpudist.models import Transformer, TransformerConfig
from tpudist.models.decoder import KVCache, decode_step, generate, prefill
from tpudist.models.presets import PRESETS
from tpudist.xla.estimate import memory

SMALL = TransformerConfig(
    vocabulary=64, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24
)
TOKENS = jax.random.randint(jax.random.key(1), (4, 12), 0, SMALL.vocabulary)
LENGTHS = jnp.array([6, 3, 5, 1])  # of the prompts
ROWS = jnp.arange(4)


def make(config: TransformerConfig = SMALL) -> Transformer:
    return Transformer(config, rngs=nnx.Rngs(0))


def decode_all(model, cache, run):
    """Returns the logits after the prompts and after each of 5 more tokens, `[6, batch, ...]`."""
    logits = [run(prefill, (model, cache, TOKENS[:, :6], LENGTHS))]
    logits += [run(decode_step, (model, cache, TOKENS[ROWS, LENGTHS + i])) for i in range(5)]
    return np.stack(logits)


def run_jitted(function, args):
    return nnx.jit(function)(*args)


def of_complete_sequences(model):
    logits = nnx.jit(lambda model: model(TOKENS))(model)
    return np.stack([logits[ROWS, LENGTHS - 1 + i] for i in range(6)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": None, "biased": True, "norm_heads": True, "attention_cap": 5.0},
        {"attention_window": 4, "attention_sinks": True, "output_cap": 10.0},
        {"attention_window": 4, "layers_with_window": (True, False), "local_rotary_base": 100.0},
        {"learned_positions": 32, "norm": "layer", "gated": False, "tied": True},
        {"num_experts": 4, "mlp_dim": 8, "expert_method": "grouped"},
        {"num_experts": 4, "mlp_dim": 8, "expert_capacity": 2.0},  # drops no token
    ],
    ids=str,
)
def test_step_by_step_decoding_has_the_logits_of_complete_sequences(changes):
    model = make(dataclasses.replace(SMALL, **changes))
    got = decode_all(model, KVCache(model.config, 4, 12), run_jitted)
    np.testing.assert_allclose(got, of_complete_sequences(model), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        ({"tensor": 2}, {}),
        ({"tensor": 4}, {"num_kv_heads": 4}),
        ({"data": 2, "tensor": 2}, {}),
        ({"fsdp": 2, "tensor": 2}, {"tied": True}),
        ({"sequence": 2}, {}),
        ({"expert": 4}, {"num_experts": 4, "mlp_dim": 8, "expert_capacity": 2.0}),
    ],
    ids=str,
)
def test_decoding_on_a_mesh_has_the_logits_of_one_device(axes, changes):
    config = dataclasses.replace(SMALL, **changes)
    size = int(np.prod(list(axes.values())))
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=jax.devices()[:size])
    model = strategy.create(lambda: make(config))
    cache = strategy.create(lambda: KVCache(config, 4, 12))
    if "tensor" in axes and not changes.get("tied"):
        assert "tensor" in cache.keys[...].sharding.spec
    got = decode_all(model, cache, strategy.run)
    np.testing.assert_allclose(got, of_complete_sequences(make(config)), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "width"), [({}, 4), ({}, 256), ({"data": 2, "tensor": 2}, 256)], ids=str
)
def test_a_cache_of_integers_has_nearly_the_same_logits(axes, width):
    config = dataclasses.replace(SMALL, head_width=width, attention_sinks=True)
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=jax.devices()[: 4 if axes else 1])
    model = strategy.create(lambda: make(config))
    cache = strategy.create(lambda: KVCache(config, 4, 12, dtype=jnp.int8))
    got, want = decode_all(model, cache, strategy.run), of_complete_sequences(make(config))
    assert cache.keys[...].dtype == jnp.int8
    assert 0 < np.abs(got - want).max() < 0.02 * np.abs(want).max()


@pytest.mark.slow
def test_generate_continues_prompts_of_different_lengths_by_the_likeliest_tokens():
    model = make()
    got = np.array(generate(model, TOKENS[:, :6], 4, lengths=LENGTHS))
    for row, length in enumerate(LENGTHS):
        tokens = TOKENS[row, :length]
        for want in got[row]:
            assert want == jnp.argmax(model(tokens[None])[0, -1])
            tokens = jnp.append(tokens, want)
    end = int(got[0, 1])
    ended = np.array(generate(model, TOKENS[:1, :6], 4, end_token=end))
    assert ended[0].tolist() == [got[0, 0], end, end, end]
    drawn = [
        generate(model, TOKENS[:, :6], 4, temperature=5.0, key=jax.random.key(i)) for i in (0, 0, 1)
    ]
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] != drawn[2]).any()


@pytest.mark.slow
def test_each_replica_generates_for_its_own_prompts():
    strategy = tpudist.MirroredStrategy(jax.devices()[:2])
    model = strategy.create(make)
    prompts = strategy.experimental_distribute_dataset(
        tpudist.NumpyDataset(np.array(TOKENS[:, :6])).batch(4)
    )
    (rows,) = prompts
    got = strategy.run(lambda model, rows: generate(model, rows, 3), (model, rows))
    want = generate(make(), TOKENS[:, :6], 3)
    assert (strategy.gather(got, axis=0) == want).all()


@pytest.mark.slow
def test_a_full_cache_forgets_the_oldest_tokens():
    """Layers with a window need no more slots than the window."""
    config = dataclasses.replace(SMALL, attention_window=16)
    model, tokens = make(config), jax.random.randint(jax.random.key(2), (1, 40), 0, 64)
    cache = KVCache(config, 1, 16)
    logits = [run_jitted(prefill, (model, cache, tokens[:, :8]))]
    logits += [run_jitted(decode_step, (model, cache, tokens[:, i])) for i in range(8, 40)]
    np.testing.assert_allclose(np.concatenate(logits), model(tokens)[0, 7:], atol=1e-5)


@pytest.mark.libtpu
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the compiler of jax 0.10 moves twice the bytes"
)
@pytest.mark.slow
@pytest.mark.parametrize(("width", "dtype"), [(128, "bfloat16"), (256, "int8")])
def test_a_decode_step_on_a_tpu_reads_weights_and_cache_once_and_copies_neither(width, dtype):
    sizes = {"num_layers": 2, "vocabulary": 2048, "head_width": width}
    config = PRESETS["llama-3.1-8b"].config
    config = dataclasses.replace(config, param_dtype="bfloat16", **sizes)
    strategy = tpudist.TPUStrategy(devices=tpudist.planner.devices("v5e:1x1"))
    model = strategy.create_abstract(lambda: make(config))
    cache = strategy.create_abstract(lambda: KVCache(config, 16, 2048, dtype=dtype))
    tokens = jax.ShapeDtypeStruct((16,), jnp.int32)
    plan = strategy.plan(decode_step, (model, cache, tokens), topology="v5e:1x1")
    arrays = jax.tree.leaves(nnx.state((model, cache)))
    read = sum(x.size * x.dtype.itemsize for x in arrays) - 2 * model.embedding.size
    # With only two layers, the compiler prefetches a part of the weights into VMEM, and writes it.
    assert read < plan.time.hbm_bytes < 1.15 * read
    assert plan.memory.categories[memory.TEMPORARIES] < 0.01 * read
    assert not any("loop copies" in note for note in plan.notes)


def test_wrong_sizes_of_a_cache_and_of_generate_raise_errors():
    model = nnx.eval_shape(make)
    cache = nnx.eval_shape(lambda: KVCache(SMALL, 2, 10))
    with pytest.raises(ValueError, match="4 prompts of 12 tokens, but the cache has 2 sequences"):
        prefill(model, cache, TOKENS)
    with pytest.raises(ValueError, match="num_slots=0.* has no space for a token"):
        KVCache(SMALL, 2, 0)
    with pytest.raises(ValueError, match="int16.* integers without a scale"):
        KVCache(SMALL, 2, 8, dtype=jnp.int16)
    with pytest.raises(ValueError, match="temperature above 0 needs key="):
        generate(model, TOKENS, 2, temperature=1.0)
    for change in ({"num_layers": 1}, {"num_kv_heads": 4}, {"head_width": 8}):
        config = dataclasses.replace(SMALL, **change)
        other = nnx.eval_shape(lambda config=config: KVCache(config, 4, 12))
        with pytest.raises(ValueError, match="is not for these tokens and this model"):
            nnx.eval_shape(lambda model, cache: prefill(model, cache, TOKENS), model, other)
    for lengths in ([6, 3, 0, 1], [6, 3, 13, 1], [6], [[6, 3, 5, 1]], [6, 3, 2.5, 1]):
        with pytest.raises(ValueError, match="integers of at least 1 and at most"):
            generate(model, TOKENS, 2, lengths=jnp.array(lengths))
    with pytest.raises(ValueError, match=r"tokens of shape \(2, 1\), but adds one .* 2 sequences"):
        decode_step(model, cache, TOKENS[:2, :1])
    with pytest.raises(ValueError, match=r"prompts \(4, 0\) with lengths=None"):
        generate(model, TOKENS[:, :0], 2)
    many = dataclasses.replace(SMALL, learned_positions=10)
    with pytest.raises(ValueError, match="has 16 tokens, but the model has learned_positions=10"):
        generate(nnx.eval_shape(lambda: make(many)), TOKENS[:, :8], 2)
