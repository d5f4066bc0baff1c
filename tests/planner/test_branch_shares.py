"""Choices that a jaxpr decides: branches in scans, and masked blocks of attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpudist.planner import branch_shares
from tpudist.xla import splash_attention


def _layer(x, weight_and_flag):
    weight, flag = weight_and_flag
    run = jax.checkpoint(lambda x, w: jax.lax.cond(flag, lambda v: jnp.sin(v * w), jnp.cos, x))
    return run(x, weight), None


def _find(flags, further=None):
    def loss(weights, x):
        out = jax.lax.scan(_layer, x, (weights, flags))[0].sum()
        return out if further is None else further(out)

    return branch_shares.find(
        jax.make_jaxpr(jax.value_and_grad(loss))(jnp.ones(len(flags)), jnp.ones(3))
    )


def test_constants_of_a_scan_decide_the_branches():
    flags = np.array([True, True, True, False])
    assert _find(flags).branches == {2: (0.25, 0.75)}


def test_other_branches_depend_on_the_data():
    flags = np.array([True, False])
    assert _find(flags, lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)).branches == {}
    step = jax.make_jaxpr(lambda f: jax.lax.scan(_layer, jnp.ones(3), (jnp.ones(3), f))[0])
    assert branch_shares.find(step(np.array([True, False, True]))).branches == {}


def test_numbers_of_layers_decide_the_branches():
    layer = lambda x, number: (_switch(x, number % 3), None)  # noqa: E731
    step = jax.make_jaxpr(lambda x: jax.lax.scan(layer, x, jnp.arange(4))[0])(jnp.ones(3))
    assert branch_shares.find(step).branches == {3: (0.5, 0.25, 0.25)}


def _switch(x, number):
    return jax.lax.switch(jnp.int32(number), [jnp.sin, jnp.cos, jnp.tan], x)


@pytest.mark.parametrize(
    ("layer", "numbers", "shares"),
    [
        (lambda x, n: _switch(x, n % 3), np.arange(0), {}),
        (lambda x, n: _switch(x, ~n + 2), np.arange(2), {3: (0.5, 0.5, 0.0)}),
        # The inner choice is made in every second layer only, first in the second one.
        (
            lambda x, n: jax.lax.cond(n % 2 == 1, lambda v: _switch(v, n > 1), jnp.exp, x),
            np.arange(4),
            {2: (0.5, 0.5), 3: (0.5, 0.5, 0.0)},
        ),
        (lambda x, n: _switch(x, n % 3), np.arange(1000), {}),  # too many to follow
    ],
)
def test_layers_choose_as_their_numbers_say(layer, numbers, shares, monkeypatch):
    monkeypatch.setattr(branch_shares, "_MAX_EQUATIONS", 1000)
    step = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, n: (layer(c, n), None), x, numbers)[0])
    assert branch_shares.find(step(jnp.ones(3))).branches == shares


def test_tables_of_attention_count_the_blocks_of_their_masks():
    def step(query, key, value):
        out = splash_attention.causal_attention(
            query,
            key,
            value,
            block=128,
            backward_block=128,
            name="attention",
            interpret=True,
            window=100,
        )
        return out.sum()

    arrays = [jax.ShapeDtypeStruct((1, 1024, 1, 128), jnp.bfloat16)] * 3
    blocks = branch_shares.find(jax.make_jaxpr(jax.grad(step))(*arrays)).blocks
    # Row i sees blocks i and i - 1: 15 of 8 x 8 blocks.
    assert {kernel.split("_no_")[0] for kernel, _ in blocks} >= {"splash_mha_dkv"}
    assert set(blocks.values()) == {15.0}
