"""Mixture of experts: the routing of tokens, and that only tokens cross the axis `expert`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType

from geometry_program import CONFIG, batches
from model_programs import sent_by_step, sent_by_step_on_tpu
from tpudist.models import Transformer, TransformerConfig, next_token_loss, next_token_nats
from tpudist.models.parts import expert_groups, experts
from tpudist.planner import model_flops

ROOMY = dataclasses.replace(CONFIG, num_experts=4, expert_capacity=2.0, expert_balance=0.5)


ASSIGN = jax.jit(experts.assign, static_argnums=(1, 2))
CHOOSE = jax.jit(experts.choose, static_argnums=1)
# Few shapes, because each is compiled, but many values.
SHAPES = st.sampled_from([(1, 1), (4, 1), (4, 2), (5, 3), (3, 3)])
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.slow
@settings(max_examples=50)
@given(SHAPES, st.sampled_from([1, 3, 7]), st.integers(1, 4), SEEDS)
def test_an_expert_accepts_choices_in_order_until_it_is_full(shape, slots, skew, seed):
    """Also checks that the two halves of an assignment are inverse to each other."""
    num_experts, each = shape
    scores = np.random.default_rng(seed).random((2, 7, num_experts)) ** skew
    scores += np.linspace(0, 1 - 1 / skew, num_experts)  # the last experts get more
    chosen = np.argsort(-scores, axis=-1)[..., :each].reshape(2, -1).astype(np.int32)
    slot_of_choice, choice_of_slot = map(np.asarray, ASSIGN(chosen, num_experts, slots))
    for row, to, back in zip(chosen, slot_of_choice, choice_of_slot, strict=True):
        room = dict.fromkeys(range(num_experts), slots)
        holds = np.full(num_experts * slots, row.size)
        for choice, expert in enumerate(row):
            if room[expert]:
                slot = expert * slots + slots - room[expert]
                room[expert] -= 1
                assert to[choice] == slot
                holds[slot] = choice
            else:
                assert to[choice] == num_experts * slots
        np.testing.assert_array_equal(back, holds)


@settings(max_examples=50)
@given(SHAPES, SEEDS)
def test_a_token_is_sent_to_its_most_likely_experts_with_shares_that_sum_to_one(shape, seed):
    num_experts, each = shape
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.ones(num_experts), size=(2, 3)).astype(np.float32)
    shares, chosen = map(np.asarray, CHOOSE(probabilities, each))
    assert all(len(set(of_token)) == each for of_token in chosen.reshape(-1, each))
    likeliest = -np.sort(-probabilities, axis=-1)[..., :each]
    taken = np.take_along_axis(probabilities, chosen, axis=-1)
    np.testing.assert_array_equal(taken, likeliest)
    np.testing.assert_allclose(shares.sum(axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(shares * likeliest.sum(axis=-1, keepdims=True), taken, rtol=1e-5)


@given(
    length=st.integers(1, 64),
    num_experts=st.integers(1, 16),
    each=st.integers(1, 4),
    room=st.floats(0.1, 20),
)
def test_the_capacity_of_the_experts_is_a_multiple_of_all_choices(length, num_experts, each, room):
    config = TransformerConfig(
        num_experts=num_experts, experts_per_token=min(each, num_experts), expert_capacity=room
    )
    slots = experts.capacity(length, config)
    assert 1 <= slots <= length
    wanted = room * length * config.experts_per_token
    # The slots of an expert are rounded up from a number with 6 digits.
    assert slots == length or -1e-5 <= num_experts * slots - wanted < num_experts + 1e-5


MLP = jax.jit(experts.mlp, static_argnums=2)


def weights_and_rows():
    rng = np.random.default_rng(0)
    embed, mlp, num_experts = ROOMY.embed_dim, ROOMY.mlp_dim, ROOMY.num_experts
    shapes = {
        "router": (embed, num_experts),
        "mlp_in": (num_experts, embed, 2, mlp),
        "mlp_out": (num_experts, mlp, embed),
    }
    weights = {name: normal(rng, 0.2, *shape) for name, shape in shapes.items()}
    return weights, normal(rng, 1.0, 3, 8, embed)


def normal(rng, std, *shape):
    return jnp.asarray(rng.normal(0, std, shape).astype(np.float32))


def by_token(x, weights, config):
    """Computes the same token by token, without capacity limits."""

    def bias(name, *chosen):
        return weights[name][chosen] if name in weights else 0

    def of_token(token):
        probabilities = jax.nn.softmax(token @ weights["router"] + bias("router_bias"))
        shares, chosen = jax.lax.top_k(probabilities, config.experts_per_token)
        if config.normalize_shares:
            shares = shares / shares.sum()
        hidden = jnp.einsum("e,kefm->kfm", token, weights["mlp_in"][chosen])
        gate, up = jnp.moveaxis(hidden + bias("mlp_in_bias", chosen), 1, 0)
        if (limit := config.swiglu_limit) is None:
            hidden = jax.nn.silu(gate) * up
        else:  # as in the package `transformers`, modeling_gpt_oss.py
            gate, up = gate.clip(max=limit), up.clip(-limit, limit)
            hidden = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
        out = jnp.einsum("km,kme->ke", hidden, weights["mlp_out"][chosen])
        return shares @ (out + bias("mlp_out_bias", chosen))

    return jax.vmap(jax.vmap(of_token))(x)


def assert_equal_by_token(weights, x, config):
    """Checks values and gradients; the gathers that send tokens have custom gradients."""

    def value_of(f):
        summed = jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), argnums=(0, 1))
        return jax.jit(summed)(x, weights)

    got = value_of(lambda x, w: experts.mlp(x, w, config)[0])
    want = value_of(lambda x, w: by_token(x, w, config))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_each_token_is_computed_by_its_own_experts_if_capacity_suffices():
    weights, x = weights_and_rows()
    assert_equal_by_token(weights, x, ROOMY)
    np.testing.assert_array_equal(MLP(x, weights, ROOMY)[1].dropped, 0)


GROUPED = dataclasses.replace(ROOMY, expert_method="grouped")


def weights_of_gpt_oss():
    weights, x = weights_and_rows()
    rng = np.random.default_rng(1)
    for name, dims in (("router", (0,)), ("mlp_in", (1,)), ("mlp_out", (1,))):
        shape = np.delete(weights[name].shape, dims)
        weights[f"{name}_bias"] = normal(rng, 0.3, *shape)
    # Large inputs, so that the bound matters.
    return weights, 3 * x


@pytest.mark.parametrize("method", ["dispatch", "grouped"])
def test_experts_have_the_biases_and_the_activation_of_gpt_oss(method):
    config = dataclasses.replace(
        ROOMY, expert_method=method, normalize_shares=False, swiglu_limit=1.0
    )
    assert_equal_by_token(*weights_of_gpt_oss(), config)


def test_grouped_experts_drop_no_choice():
    weights, x = weights_and_rows()
    x = np.broadcast_to(x[:, :1], x.shape)  # all tokens of a row choose the same experts
    config = dataclasses.replace(GROUPED, expert_capacity=0.1)
    y, routing = MLP(x, weights, config)
    np.testing.assert_allclose(y, by_token(x, weights, config), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(routing.dropped, 0)


@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 2, "expert": 2, "tensor": 2},
        pytest.param({"fsdp": 4, "sequence": 2}, marks=pytest.mark.slow),
    ],
)
def test_grouped_experts_equal_a_loop_on_any_mesh(axes):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    known = {
        "batch": ("fsdp", "expert"),
        "expert_batch": ("fsdp",),
        **{"expert": "expert", "embed": "fsdp", "mlp": "tensor", "sequence": "sequence"},
    }
    rules = [
        (name, tuple(a for a in ((of,) if isinstance(of, str) else of) if a in axes))
        for name, of in known.items()
    ]
    weights, x = weights_of_gpt_oss()
    config = dataclasses.replace(GROUPED, swiglu_limit=1.0)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        assert_equal_by_token(weights, jnp.concatenate([x, x[:1]]), config)


def test_model_flops_count_each_choice_once():
    """Both passes of the experts' products, and not more for more experts."""
    weights, x = weights_and_rows()
    del weights["router"]
    shares, chosen = jnp.ones((3, 1, 8, 2)), jnp.zeros((3, 1, 8, 2), jnp.int32)

    def loss(x, w):
        return expert_groups.apply(x[:, None], chosen, shares, w, None).sum()

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(x, weights)
    products = 3 * 8 * 2 * 3 * ROOMY.embed_dim * ROOMY.mlp_dim
    weighted_sums = 3 * 3 * 8 * 2 * ROOMY.embed_dim
    [flops] = model_flops.model_flops(jaxpr, 1)[0].values()
    assert flops == pytest.approx(2 * (3 * products + weighted_sums), rel=0.01)


def test_the_capacity_has_no_slot_more_because_of_rounding():
    config = dataclasses.replace(ROOMY, num_experts=4, experts_per_token=2, expert_capacity=1.1)
    assert experts.capacity(100, config) == 55


@pytest.mark.slow
def test_choices_beyond_the_capacity_are_counted_and_contribute_nothing():
    config = dataclasses.replace(ROOMY, experts_per_token=1, expert_capacity=1.0)
    weights, x = weights_and_rows()
    x = np.broadcast_to(x[:, :1], x.shape)  # all tokens of a row choose the same expert
    y, routing = MLP(x, weights, config)
    assert experts.capacity(8, config) == 2
    np.testing.assert_allclose(routing.dropped, 6 / 8)
    np.testing.assert_array_equal(y[:, 2:], 0)
    np.testing.assert_allclose(y[:, :2], by_token(x, weights, config)[:, :2], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_no_token_depends_on_later_tokens():
    """Capacity is assigned by position, so training sees the same tokens as generation."""
    config = dataclasses.replace(ROOMY, expert_capacity=0.5)
    weights, x = weights_and_rows()
    changed = np.concatenate([x[:, :5], -3 * x[:, 5:]], axis=1)
    before, after = (MLP(rows, weights, config)[0] for rows in (x, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])


@pytest.mark.slow
def test_the_training_loss_adds_the_imbalance_of_each_row():
    tokens = jnp.asarray(batches(1)[0])

    @jax.jit
    def of_rows(tokens):
        model = Transformer(dataclasses.replace(ROOMY, num_layers=1), rngs=nnx.Rngs(0))
        imbalance = model.hidden(tokens[:, :-1].astype(jnp.int32))[1].imbalance
        return imbalance, next_token_loss(model, tokens) - next_token_nats(model, tokens)

    imbalance, added = of_rows(tokens)
    assert imbalance.shape == (len(tokens),)
    assert np.all((imbalance >= 0.5) & (imbalance < 4))
    want = np.broadcast_to(ROOMY.expert_balance * (imbalance - 1)[:, None], added.shape)
    np.testing.assert_allclose(added, want, atol=1e-5)


def test_the_imbalance_has_a_gradient_for_the_router():
    weights, x = weights_and_rows()
    pull = jax.jit(jax.grad(lambda w: experts.mlp(x, w, ROOMY)[1].imbalance.sum()))(weights)
    assert np.abs(pull["router"]).max() > 0
    np.testing.assert_array_equal(pull["mlp_in"], 0)


@pytest.mark.slow
def test_equally_used_experts_have_an_imbalance_of_one():
    even = jnp.full((1, 4, 4), 0.25)
    np.testing.assert_allclose(experts.imbalance(even, jnp.arange(4)[None, :, None]), 1)
    one = jnp.eye(4)[jnp.zeros((1, 4), int)]
    np.testing.assert_allclose(experts.imbalance(one, jnp.zeros((1, 4, 1), int)), 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": -1}, "num_experts=-1: it must not be negative. Use 0"),
        (
            {"experts_per_token": 5},
            "num_experts=4: each token goes to different experts. Use at most 4",
        ),
        ({"expert_capacity": 0.0}, "leaves the experts no space.*Use 1.25, or 2 so that no"),
    ],
)
def test_invalid_expert_options_are_rejected(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(ROOMY, **change)


# Communication in the compiled program.

GEOMETRIES = {
    "expert=4": {"expert": 4},
    "mixed": {"fsdp": 2, "expert": 2, "tensor": 2},
}


def assert_tokens_go_to_their_experts(found, axes, rows, length, config=ROOMY):
    """Tokens go to experts and back, in both passes; all other traffic is gradients or weights."""
    across = [x for x in found if "expert" in x.axes and "while" in x.op_name]
    num_groups = axes["expert"] if config.expert_method == "grouped" else config.num_experts
    slots = num_groups * experts.capacity(length, config, num_groups)
    num_rows = rows // (axes["expert"] * axes.get("fsdp", 1))
    num_bytes = 4 * num_rows * slots * ROOMY.embed_dim
    # Grouped products also send the number of the expert of each slot.
    numbers = 4 * num_rows * slots
    sent = [x for x in across if x.kind == "all-to-all" and x.num_bytes != numbers]
    assert [x.axes for x in sent] == [("expert",)] * 4
    # On TPU, operands of a float32 matmul are rounded to bfloat16 before they are sent.
    assert {x.num_bytes for x in sent} <= {num_bytes, num_bytes // 2}
    # XLA:CPU computes top-k in a library call, which it cannot split, so it gathers the operand.
    # The gather is named after the call until jaxlib 0.10, then after the last operation on the
    # probabilities.
    probabilities = 4 * rows * length * ROOMY.num_experts
    gathered = [
        x
        for x in across
        if x.kind == "all-gather"
        and "top_k" not in x.op_name
        and not (x.op_name.endswith("/div") and x.num_bytes == probabilities)
    ]
    assert gathered == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["expert=4", pytest.param("mixed", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("config", [ROOMY, GROUPED], ids=lambda x: x.expert_method)
def test_tokens_go_to_their_experts_and_back_by_all_to_all(config, name):
    found = sent_by_step(config, GEOMETRIES[name], rows=16, length=16)
    assert_tokens_go_to_their_experts(found, GEOMETRIES[name], 16, 16, config)


@pytest.mark.libtpu
@pytest.mark.slow
@pytest.mark.parametrize("config", [ROOMY, GROUPED], ids=lambda x: x.expert_method)
def test_on_tpu_tokens_go_to_their_experts_and_back_by_all_to_all(config):
    axes = GEOMETRIES["mixed"]
    found = sent_by_step_on_tpu(config, axes, 16, 16, "v5e:2x4")
    assert_tokens_go_to_their_experts(found, axes, 16, 16, config)
