"""A plan that is extrapolated from few layers has the figures of the plan of all layers."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import tpudist
from tpudist import planner
from tpudist.planner import GlobalBatch, extrapolation
from tpudist.xla.estimate.collective_traffic import CollectiveUse

WIDTH = 2048
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
ROWS = jax.ShapeDtypeStruct((65536, WIDTH), jnp.bfloat16)


def _params(num_layers):
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    return {"layers": [{"up": w, "down": w} for _ in range(num_layers)], "head": w}


def _make_step(axis=None, checkpoint=False):
    def layer(x, w):
        w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    def loss(params, x):
        for w in params["layers"]:
            x = (jax.checkpoint(layer) if checkpoint else layer)(x, w)
        return jnp.mean((x @ params["head"]) ** 2)

    def step(params, state, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        if axis is not None:
            value, gradients = jax.lax.pmean((value, gradients), axis)
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def _plan(kind, num_layers, *, extrapolate):
    params = _params(num_layers)
    args = params, jax.eval_shape(TX.init, params)
    options = {"topology": "v5e-8", "extrapolate": extrapolate}
    if kind == "strategy":
        donated = tpudist.RunOptions(donate_argnums=(0, 1))
        step, args = _make_step("replica"), (*args, GlobalBatch(ROWS))
        return tpudist.TPUStrategy().plan(step, args, options=donated, **options)
    weights = P("data") if kind == "fsdp" else P()
    specs = jax.tree.map(lambda x: weights if x.ndim else P(), args)
    step = _make_step(checkpoint=kind == "checkpoint")
    options |= {"mesh": {"data": 8}, "in_shardings": (*specs, P("data")), "donate_argnums": (0, 1)}
    return planner.plan(step, *args, ROWS, **options)


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.parametrize("kind", ["fsdp", "checkpoint", "strategy"])
def test_extrapolated_plan(kind):
    few, whole = (_plan(kind, 32, extrapolate=x) for x in (True, False))
    assert any("6 and 8 of the 32 equal layers" in note for note in few.notes)
    assert few.time.flops == pytest.approx(whole.time.flops, rel=1e-6)
    assert few.model_flops == whole.model_flops
    assert few.ici_bytes == pytest.approx(whole.ici_bytes, rel=1e-6)
    assert few.memory.categories["parameters"] == whole.memory.categories["parameters"]
    assert few.memory.peak_bytes == pytest.approx(whole.memory.peak_bytes, rel=0.05)
    assert few.time.step_s == pytest.approx(whole.time.step_s, rel=0.03)
    assert few.time.low_s < 0.95 * few.time.step_s < 1.05 * few.time.step_s < few.time.high_s


def test_transfers_of_one_line_are_one():
    def use(count, num_bytes, source="model.py:3"):
        sent = count * num_bytes * 1.75
        cost = sent, sent / 1e9, 0.0
        return CollectiveUse(
            "all-reduce", num_bytes, count, ("data",), "ici", False, source, "", *cost
        )

    (found,) = extrapolation.extrapolate_collectives([use(4, 10)], [use(5, 10), use(1, 10)], 9)
    assert (found.count, found.num_bytes, found.sent_bytes) == (24, 10, 24 * 10 * 1.75)
    # The compiler joined transfers of two lines.
    few, more = [use(1, 40, "a.py:1")], [use(1, 40, "b.py:2"), use(1, 20, "a.py:1")]
    (found,) = extrapolation.extrapolate_collectives(few, more, 9)
    assert found.sent_bytes == 240 * 1.75


def test_a_step_without_layers_is_compiled_completely():
    notes = planner.plan(jnp.sin, ROWS, topology="v5e-1", extrapolate=True).notes
    assert extrapolation.NOTE_ON_COMPLETE_STEP in notes


def test_an_executable_needs_all_layers():
    with pytest.raises(ValueError, match="omit one of them"):
        planner.plan(jnp.sin, ROWS, topology="v5e-1", extrapolate=True, in_process=True)
