"""The implementations of attention agree, and each is chosen in the right case."""

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tpudist
from tpudist.models import Transformer, TransformerConfig, next_token_nats
from tpudist.models.parts import attention
from tpudist.xla import splash_attention, topology
from tpudist.xla.hlo import collective_ops

RULES = (
    ("batch", "fsdp"),
    ("sequence", "sequence"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
)


def mesh_of(**inner: int) -> jax.sharding.Mesh:
    shape = {"replica": 8 // math.prod(inner.values())} | inner
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape)
    )


def ring_of(num_devices: int) -> jax.sharding.Mesh:
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), ("s",), (AxisType.Auto,), devices=devices)


def query_key_value(batch=2, length=16, heads=2, kv_heads=2, width=8, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(
        jax.random.normal(key, (batch, length, n, width), dtype)
        for key, n in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    )


def with_gradients(method: str, **options):
    """Returns a function of query, key and value that returns the result and its gradients."""

    def run(*inputs):
        out, back = jax.vjp(lambda *x: attention.attend(*x, method=method, **options), *inputs)
        return out, *back(jnp.cos(out))

    return run


def within(mesh: jax.sharding.Mesh, function):
    """Returns the function as a replica of the mesh runs it."""
    everywhere = PartitionSpec()
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=everywhere,
            out_specs=everywhere,
            axis_names={"replica"},
            check_vma=False,
        )
    )


def assert_same(got, want, tolerance=1e-5):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@hypothesis.given(
    devices=st.sampled_from([1, 2, 4, 8]),
    part=st.integers(1, 5),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    tile=st.sampled_from([2, 3, 512]),
)
@hypothesis.settings(max_examples=3)
def test_ring_attention_matches_attention_on_any_number_of_devices(
    devices, part, kv_heads, group, tile
):
    """Values and gradients agree within float32 rounding."""
    inputs = query_key_value(1, devices * part, kv_heads * group, kv_heads)
    want = jax.jit(with_gradients("dot_product"))(*inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.attention_tiles, "_TILE", tile)
        with jax.set_mesh(mesh_of(sequence=devices)), nnx.logical_axis_rules(RULES):
            got = within(mesh_of(sequence=devices), with_gradients("ring"))(*inputs)
    assert_same(got, want)


@pytest.mark.slow
def test_ring_attention_with_the_kernel_matches_attention():
    inputs = query_key_value(1, 2 * 256, 2, 1)
    blocks = splash_attention.SplashBlocks(interpret=True)

    def run(*inputs):
        out, back = jax.vjp(lambda *x: ring(*x, blocks), *inputs)
        return out, *back(jnp.cos(out))

    def ring(query, key, value, blocks):
        arrays = (attention.ring_attention.into_ring_order(x, "s") for x in (query, key, value))
        out = attention.ring_attention.causal_attention(*arrays, "s", None, blocks)
        return attention.ring_attention.out_of_ring_order(out, "s")

    mesh, split = ring_of(2), PartitionSpec(None, "s")
    everywhere = jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    assert_same(jax.jit(everywhere)(*inputs), with_gradients("dot_product")(*inputs), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_in_chunks_equal_those_of_one_kernel(is_causal, monkeypatch):
    """A kernel for a whole long sequence would need memory for the square of its length."""
    query, key, value = (
        jnp.moveaxis(x, 2, 1) for x in query_key_value(1, 384, heads=2, kv_heads=1, width=128)
    )
    out, log_weight = attention.attention_tiles.forward(query, key, value, is_causal)
    arrays = (query, key, value, log_weight, jnp.square(out).sum(-1), out, is_causal)
    monkeypatch.setattr(splash_attention, "_MOST_PARTS", 1)  # three chunks
    found = splash_attention.SplashBlocks(128, 128, interpret=True).backward(*arrays)
    for got, wanted in zip(found, attention.attention_tiles.backward(*arrays), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5)


def test_ring_order_gives_each_device_an_early_and_a_late_chunk():
    split = PartitionSpec("s")
    for devices in (2, 3):
        mesh = ring_of(devices)

        def run(x):
            ordered = attention.ring_attention.into_ring_order(x, "s", 0)
            return ordered, attention.ring_attention.out_of_ring_order(ordered, "s", 0)

        run = jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
        positions = jnp.arange(4 * devices)
        ordered, back = run(positions)
        expected = attention.ring_attention.ring_positions(len(positions), devices)
        np.testing.assert_array_equal(ordered, expected)
        np.testing.assert_array_equal(back, positions)
    np.testing.assert_array_equal(ordered, [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7])


def test_wide_heads_have_fewer_keys_per_part_of_the_backward_pass():
    """With 2048 keys, heads of width 256 exceed the VMEM of a kernel by 1 %."""
    sizes = [splash_attention._block_sizes(16_384, w, None, None, 4)[1] for w in (64, 128, 256)]
    assert sizes == [2048, 2048, 1024]


def test_the_tables_of_a_mask_equal_those_of_jax():
    """Tiles that are empty or full have one element here."""
    masks = splash_attention.masks
    for mask, lazy in (
        (masks.CausalMask, splash_attention._CausalMask),
        (functools.partial(masks.LocalMask, window_size=(299, 0), offset=0),
         functools.partial(splash_attention._LocalMask, window_size=(299, 0), offset=0)),
    ):  # fmt: skip
        for process in (
            splash_attention.mask_info.process_mask,
            splash_attention.mask_info.process_mask_dkv,
        ):
            found, expected = (
                process(masks.MultiHeadMask([kind((1024, 1024))]), (128, 256))[0]
                for kind in (lazy, mask)
            )
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_model_moves_its_activations_into_ring_order_once():
    """It equals the same model on one device, and no layer exchanges queries for the order."""
    config = TransformerConfig(
        num_layers=2, embed_dim=16, num_heads=2, mlp_dim=16, vocabulary=7, attention="ring"
    )
    model, tokens = Transformer(config, rngs=nnx.Rngs(0)), jnp.arange(16).reshape(1, 16) % 7

    def loss_and_gradients(state):
        graph = nnx.graphdef(model)
        return jax.value_and_grad(
            lambda state: next_token_nats(nnx.merge(graph, state), tokens).sum()
        )(state)

    state = nnx.state(model)
    expected = jax.jit(loss_and_gradients)(state)
    with jax.set_mesh(mesh_of(sequence=4)), nnx.logical_axis_rules(RULES):
        found = within(mesh_of(sequence=4), loss_and_gradients)(state)
    assert_same(jax.tree.leaves(found), jax.tree.leaves(expected))


def ring_on(length: int, method: str = "ring") -> jax.stages.Compiled:
    """Compiles attention and its gradients for a sequence that is split over 8 devices."""
    mesh = mesh_of(sequence=8)
    where = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for x in query_key_value(1, length)
    ]
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        run = jax.jit(with_gradients(method), out_shardings=where)
        return run.lower(*shapes).compile()


@pytest.mark.slow
def test_ring_attention_communicates_only_by_permutes():
    kinds = {found.kind for found in collective_ops.collectives(ring_on(32).as_text())}
    assert kinds == {"collective-permute"}


def jaxprs_in(jaxpr):
    """Yields the jaxpr and all nested jaxprs."""
    yield jaxpr
    for value in (x for eqn in jaxpr.eqns for x in jax.tree.leaves(tuple(eqn.params.values()))):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield from jaxprs_in(inner)


def test_permutes_of_ring_attention_overlap_with_computation():
    """Each step uses the data that the previous step sent, so no permute delays its computation."""
    mesh = mesh_of(sequence=4)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        traced = jax.make_jaxpr(within(mesh, with_gradients("ring")))(*query_key_value(1, 16))
    num_permutes = []
    for jaxpr in jaxprs_in(traced.jaxpr):
        # A turn of the ring is a step of a scan; the blocks in it are scans over tiles.
        for turn in [x.params["jaxpr"].jaxpr for x in jaxpr.eqns if x.primitive.name == "scan"]:
            permutes = [eqn for eqn in turn.eqns if eqn.primitive.name == "ppermute"]
            if permutes:
                num_permutes.append(len(permutes))
                arriving = {id(x) for eqn in permutes for x in eqn.outvars}
                blocks = [eqn for eqn in turn.eqns if eqn.primitive.name == "scan"]
                assert len(blocks) == 2
                assert not arriving & {id(x) for eqn in blocks for x in eqn.invars}
    # The low and high chunks of keys and values, and of their gradients.
    assert num_permutes == [4, 8]


@pytest.mark.slow
def test_the_memory_of_ring_attention_grows_linearly_with_the_length():
    short, long = (ring_on(length).memory_analysis().temp_size_in_bytes for length in (8192, 16384))
    assert long < 2.2 * short


@pytest.mark.slow
@pytest.mark.parametrize("length", [pytest.param(128, marks=pytest.mark.exhaustive), 200])
def test_splash_attention_matches_attention_if_a_length_does_not_fill_its_tiles(length):
    inputs = query_key_value(1, length, 4, 2)
    got, want = (jax.jit(with_gradients(way))(*inputs) for way in ("splash", "dot_product"))
    assert_same(got, want)


@pytest.mark.slow
def test_two_kernels_have_the_gradients_of_one():
    inputs = query_key_value(1, 256, 4, 2)
    tiles = {"splash_block": 128, "splash_backward_block": 256}
    one, two = (
        jax.jit(with_gradients("splash", splash_fused_backward=fused, **tiles))(*inputs)
        for fused in (True, False)
    )
    assert_same(two, one)


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("splash", marks=pytest.mark.slow), "ring", "auto"])
@pytest.mark.parametrize("kv_heads", [pytest.param(4, marks=pytest.mark.exhaustive), 1])
def test_heads_are_split_over_devices_even_if_there_are_fewer_keys_than_devices(method, kv_heads):
    inputs = query_key_value(2, 16, 4, kv_heads)
    mesh = mesh_of(fsdp=2, tensor=4)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        got = within(mesh, with_gradients(method))(*inputs)
    assert_same(got, jax.jit(with_gradients("dot_product"))(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["splash", "ring"])
def test_half_precision_accumulates_in_float32(method):
    inputs = query_key_value(dtype=jnp.bfloat16)
    mesh = mesh_of(sequence=4)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        got = within(mesh, with_gradients(method))(*inputs)
    assert {x.dtype for x in got} == {jnp.dtype("bfloat16")}
    want = with_gradients("dot_product")(*(x.astype(jnp.float32) for x in inputs))
    assert_same([x.astype(jnp.float32) for x in got], want, tolerance=0.05)


def test_a_split_sequence_chooses_ring_attention():
    mesh = mesh_of(sequence=4)
    assert attention.choose_method(16) == "dot_product"
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        assert attention.choose_method(16) == "ring"
        assert attention.choose_method(18) == "dot_product"  # does not divide by 4 devices


CONFIG = TransformerConfig(num_layers=1, embed_dim=256, num_heads=2, mlp_dim=128)


def lower_for_a_tpu(axes, config=CONFIG, real=None):
    """Lowers the gradients for a batch of 4 rows per replica, `real` of them not padding.

    `real` is called with the number of replicas.
    """
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=topology.devices("v5e:2x4"))
    model = strategy.create_abstract(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    replicas = strategy.num_replicas_in_sync
    where = NamedSharding(strategy.mesh, PartitionSpec("replica"))
    tokens = jax.ShapeDtypeStruct((replicas, 4, 129), jnp.int32, sharding=where)

    def step(model, tokens):
        gradients = nnx.grad(lambda model: next_token_nats(model, tokens).mean())(model)
        return tpudist.get_replica_context().all_reduce("sum", gradients)

    batch = tpudist.PerReplica(tokens, rows=real(replicas) if real else None)
    return strategy.lower(step, args=(model, batch))


@functools.cache
def lowered_for_a_tpu(way: str, axes: tuple[tuple[str, int], ...]) -> str:
    config = CONFIG if way == "auto" else TransformerConfig(**vars(CONFIG) | {"attention": way})
    return lower_for_a_tpu(dict(axes) or None, config).as_text()


@pytest.mark.libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        (),
        pytest.param((("fsdp", 4), ("tensor", 1)), marks=pytest.mark.exhaustive),
        (("fsdp", 2), ("tensor", 2)),
    ],
)
def test_a_program_for_described_tpus_uses_the_splash_kernel(axes):
    """The choice does not depend on the platform of this machine."""
    assert lowered_for_a_tpu("auto", axes).count("tpu_custom_call") >= 2  # forward and backward
    assert "tpu_custom_call" not in lowered_for_a_tpu("dot_product", axes)


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_program_for_a_tpu_with_a_split_sequence_uses_permutes():
    text = lowered_for_a_tpu("auto", (("sequence", 4),))
    assert "collective_permute" in text
    assert text.count("tpu_custom_call") >= 4  # with a mask and without, forward and backward


def rows_of_a_tail(replicas, rows):
    """Returns the full number of rows for all replicas except the last, which has 1 row."""
    return (rows,) * (replicas - 1) + (1,)


TAILS = [
    (None, {"attention": "splash"}),
    ({"fsdp": 2, "tensor": 2}, {"attention": "splash"}),
    ({"fsdp": 2, "tensor": 2}, {"attention": "dot_product"}),
    ({"sequence": 4}, {"attention": "ring"}),
    ({"fsdp": 2, "stage": 2}, {"attention": "splash", "pipeline_stages": 2}),
    ({"expert": 4}, {"attention": "dot_product", "num_experts": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "changes"), TAILS)
def test_a_partial_batch_has_the_loss_and_gradients_of_its_real_rows(axes, changes):
    """Covers devices that split the rows of a replica, also if the rows do not divide evenly."""
    config = TransformerConfig(
        num_layers=2, embed_dim=32, num_heads=2, mlp_dim=32, dtype="float32", **changes
    )
    strategy = tpudist.TPUStrategy(replica_axes=axes, devices=jax.devices())
    rows = rows_of_a_tail(strategy.num_replicas_in_sync, 4)
    tokens = np.random.default_rng(0).integers(0, 100, (sum(rows), 17)).astype(np.int32)

    def step(model, tokens):
        nats, gradients = nnx.value_and_grad(lambda m: next_token_nats(m, tokens).sum())(model)
        return tpudist.get_replica_context().all_reduce("sum", (nats, gradients))

    def batches():
        yield np.zeros((4 * len(rows), 17), np.int32)
        yield tokens

    _, partial = strategy.experimental_distribute_dataset(batches())
    assert sum(partial.rows) == len(tokens)
    model = strategy.create(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    got = strategy.run(step, args=(model, partial))
    one = tpudist.OneDeviceStrategy()
    model = one.create(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    want = one.run(step, args=(model, tokens))
    assert_same(jax.tree.leaves(got), jax.tree.leaves(want), tolerance=2e-4)


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.parametrize("axes", [None, {"fsdp": 4}, {"fsdp": 2, "tensor": 2}])
def test_a_partial_batch_compiles_for_a_tpu_with_the_kernel(axes):
    for real in (None, lambda replicas: rows_of_a_tail(replicas, 4)):
        program = lower_for_a_tpu(axes, real=real).compile().as_text()
        assert program.count("tpu_custom_call") >= 2  # forward and backward


def test_a_program_for_cpus_has_no_kernel():
    text = jax.jit(with_gradients("auto")).lower(*query_key_value()).as_text()
    assert "tpu_custom_call" not in text


def test_attend_rejects_unsupported_arguments():
    inputs = query_key_value()
    with pytest.raises(ValueError, match="attention='flash': it must be"):
        attention.attend(*inputs, method="flash")
    with pytest.raises(ValueError, match="a multiple of 128 rows; got 100. Use 128"):
        splash_attention.causal_attention(*inputs, block=100)
    with pytest.raises(ValueError, match="whole number of tiles of 256 keys at a time; got 384"):
        splash_attention.causal_attention(*inputs, block=256, backward_block=384)
    with pytest.raises(ValueError, match="multiple of 128 rows; got 0. Use 128"):
        splash_attention.causal_attention(*inputs, block=0)
    with pytest.raises(ValueError, match="window=0"):
        splash_attention.causal_attention(*inputs, window=0)
    mesh, both = mesh_of(fsdp=2, sequence=2), (("sequence", ("fsdp", "sequence")),)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(both):
        with pytest.raises(ValueError, match="uses one mesh axis, but"):
            attention.attend(*inputs, method="ring")


def by_hand(query, key, value, scale, cap, window, sinks=None):
    """Computes attention in float64, one query at a time."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros(query.shape)
    group = query.shape[2] // key.shape[2]
    for b, i, h in np.ndindex(query.shape[:3]):
        first = 0 if window is None else max(0, i - window + 1)
        keys, values = (x[b, first : i + 1, h // group] for x in (key, value))
        scores = keys @ query[b, i, h] * scale
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        share = np.exp(scores)
        rest = 0 if sinks is None else np.exp(np.float64(sinks[h]))
        out[b, i, h] = share @ values / (share.sum() + rest)
    return out


@pytest.mark.parametrize(
    ("scale", "cap", "window", "has_window"),
    [
        (0.7, None, None, None),
        (None, 1.5, None, None),
        (None, None, 3, None),
        (0.7, 1.5, 3, None),
        (None, None, 3, True),
        (None, None, 3, False),
        (0.7, 1.5, 3, False),
    ],
)
def test_scores_support_a_scale_a_cap_and_a_window(scale, cap, window, has_window):
    inputs = query_key_value(heads=4, kv_heads=2)
    scores = attention.Scores(scale, cap, window)
    run = jax.jit(functools.partial(attention.attend, method="dot_product", scores=scores))
    flag = None if has_window is None else jnp.asarray(has_window)
    found = run(*inputs, has_window=flag)
    window = None if has_window is False else window
    want = by_hand(*inputs, 8**-0.5 if scale is None else scale, cap, window)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("has_window", [None, True, False])
def test_splash_attention_supports_the_same_scores(has_window):
    inputs = query_key_value(1, 200, 2, 1)
    flag = None if has_window is None else jnp.asarray(has_window)
    options = {"scores": attention.Scores(0.7, 1.5, 70), "has_window": flag}
    got, want = (jax.jit(with_gradients(m, **options))(*inputs) for m in ("splash", "dot_product"))
    assert_same(got, want, 2e-5)


SINKS = jnp.asarray([0.5, -1.0, 2.0, 0.0])


def test_sinks_take_a_share_of_the_softmax():
    inputs = query_key_value(heads=4, kv_heads=2)
    found = jax.jit(functools.partial(attention.attend, method="dot_product"))(*inputs, sinks=SINKS)
    want = by_hand(*inputs, 8**-0.5, None, None, SINKS)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [None, {"fsdp": 2, "tensor": 2}])
def test_splash_attention_has_the_same_sinks(axes):
    """Values and gradients, also of the sinks, in a layer with and without a window."""
    inputs = (*query_key_value(2, 200, 4, 2), SINKS)

    def run(method, has_window):
        def attend(query, key, value, sinks):
            return attention.attend(
                *(query, key, value),
                method=method,
                scores=attention.Scores(window=70),
                has_window=jnp.asarray(has_window),
                sinks=sinks,
            )

        out, back = jax.vjp(attend, *inputs)
        return out, *back(jnp.cos(out))

    def both(method):
        return *run(method, True), *run(method, False)

    want = jax.jit(functools.partial(both, "dot_product"))()
    if axes is None:
        assert_same(jax.jit(functools.partial(both, "splash"))(), want, 2e-5)
        return
    mesh = mesh_of(**axes)
    rules = [rule for rule in RULES if rule[1] in axes]
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        assert_same(within(mesh, functools.partial(both, "splash"))(), want, 2e-5)


def test_ring_attention_rejects_scores_that_it_does_not_support():
    inputs = query_key_value(heads=4)
    with pytest.raises(ValueError, match="the scores of this model use sinks.*replica_axes"):
        attention.attend(*inputs, method="ring", sinks=SINKS)
    with pytest.raises(ValueError, match="the scores of this model use cap, window.*replica_axes"):
        attention.attend(*inputs, method="ring", scores=attention.Scores(cap=3.0, window=2))
