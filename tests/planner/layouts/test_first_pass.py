"""The first pass of a search, which estimates candidates before the compiler sees them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import tpudist
from tpudist import planner
from tpudist.models import next_token_loss
from tpudist.models.parts.logical import axes
from tpudist.models.presets import make_transformer
from tpudist.models.transformer_config import TransformerConfig
from tpudist.planner.roofline import step_estimate
from tpudist.training.steps import make_train_step

pytestmark = pytest.mark.libtpu
_SMALL = TransformerConfig(
    vocabulary=4096,
    num_layers=2,
    embed_dim=1024,
    num_heads=8,
    mlp_dim=4096,
    dtype="bfloat16",
    attention="dot_product",
)
_GEOMETRIES = [{}, {"fsdp": 2}, {"fsdp": 8}, {"tensor": 2}, {"fsdp": 4, "tensor": 2}, {"tensor": 8}]


class Mlp(nnx.Module):
    def __init__(self, width: int = 4096, depth: int = 3):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            nnx.Linear(
                width,
                width,
                rngs=rngs,
                dtype=jnp.bfloat16,
                kernel_metadata=axes(*(("embed", "mlp") if i % 2 == 0 else ("mlp", "embed"))),
            )
            for i in range(depth)
        )

    def __call__(self, x):
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return x


def _step(candidate, make, loss, batch):
    strategy = tpudist.TPUStrategy(replica_axes=candidate.replica_axes, devices=candidate.devices)
    model = strategy.create_abstract(make)
    optimizer = strategy.create_abstract(
        lambda model: tpudist.Optimizer(optax.adamw(1e-3), model), model
    )
    step = make_train_step(loss, num_microbatches=candidate.microbatches)
    return strategy, step, (model, optimizer, planner.GlobalBatch(batch))


def make_mlp(candidate):
    rows = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    return _step(candidate, Mlp, lambda model, x: (model(x) ** 2).mean(axis=1), rows)


def make_small_transformer(candidate):
    config = dataclasses.replace(_SMALL, remat=candidate.remat)
    tokens = jax.ShapeDtypeStruct((candidate.batch or 64, 513), jnp.int32)

    def loss(model, tokens):
        return next_token_loss(model, tokens).mean(axis=-1)

    return _step(candidate, lambda: make_transformer(config), loss, tokens)


def search(make_step, **given):
    given = {"geometries": _GEOMETRIES, "remat": ["none"], "time_budget_s": 3600} | given
    return planner.search(make_step, "v5e-8", **given)


def test_a_search_without_compiles_ranks_all_candidates_by_their_estimates():
    result = search(make_mlp, max_compiles=0)
    times = [x.estimate.step_s for x in result.estimated]
    assert len(times) == len(_GEOMETRIES)
    assert times == sorted(times)
    assert result.best is None
    assert "fsdp" in result.estimated[0].candidate.name


def test_new_state_replaces_its_own_input():
    """An earlier weight of the same shape stays as it is."""
    strategy = tpudist.TPUStrategy(devices=planner.devices("v5e-8"))
    model = strategy.create_abstract(lambda: Mlp(width=16, depth=2))

    def step(model, x):
        model.layers[1].kernel[...] *= 0.5
        return model(x).mean(axis=1)

    rows = planner.GlobalBatch(jax.ShapeDtypeStruct((8, 16), jnp.bfloat16))
    program = step_estimate.trace_step((strategy, step, (model, rows)))
    assert program.replaced == (None, 3)  # bias 0, kernel 0, bias 1, kernel 1


def test_estimates_of_a_layout_do_not_depend_on_the_other_layouts():
    """A trace with all axes at once may have no room for replicas."""
    cube = {"expert": 2, "fsdp": 2, "tensor": 2}
    given = {"max_compiles": 0, "geometries": [{}]}
    (alone,) = search(make_small_transformer, **given).estimated
    both = search(make_small_transformer, **given | {"geometries": [{}, cube]}).estimated
    (same,) = [x for x in both if x.candidate == alone.candidate]
    # The constraints of the other layouts stand between operations that are fused here.
    assert same.estimate.step_s == pytest.approx(alone.estimate.step_s, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("make_step", [make_mlp, make_small_transformer])
def test_estimates_rank_layouts_as_compiled_plans_do(make_step):
    """Machine code would take minutes, and does not change collectives, memory or operations."""
    result = search(make_step)
    both = np.array([(x.estimate.step_s, x.step_s) for x in result.outcomes if x.step_s])
    ranks = np.argsort(np.argsort(both, axis=0), axis=0)
    assert len(both) == len(_GEOMETRIES)
    assert np.corrcoef(ranks.T)[0, 1] >= 0.8
    best = result.outcomes[int(np.argmin(both[:, 0]))]
    assert best.step_s <= 1.05 * result.best.step_s


def _plain_step(candidate):
    """Returns two products of plain JAX, whose weights are split by fsdp, and whose rows by all."""
    axes = candidate.mesh_axes
    specs = [jax.P("fsdp" if "fsdp" in axes else None)] * 2, jax.P(tuple(axes))
    weights = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 2

    def step(weights, rows):
        def loss(weights):
            return jnp.square(jnp.tanh(rows @ weights[0]) @ weights[1]).mean()

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    arrays = weights, jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
    return step, arrays, specs


def _with_specs(candidate):
    step, arrays, specs = _plain_step(candidate)
    return None, step, arrays, {"in_shardings": specs, "donate_argnums": 0}


def _with_own_mesh(candidate):
    step, arrays, specs = _plain_step(candidate)
    names = candidate.mesh_axes
    mesh = jax.make_mesh(
        tuple(names.values()),
        tuple(names),
        devices=candidate.devices,
        axis_types=(jax.sharding.AxisType.Auto,) * len(names),
    )
    shardings = jax.tree.map(lambda x: jax.NamedSharding(mesh, x), specs)
    return None, jax.jit(step, in_shardings=shardings, donate_argnums=0), arrays


@pytest.mark.slow
def test_steps_of_plain_jax_are_ranked_like_their_plans():
    how = {"geometries": [{}, {"fsdp": 8}, {"fsdp": 2}], "remat": ["none"]}
    result = planner.search(_with_specs, "v5e-8", **how)
    fastest, *_ = sorted(result.outcomes, key=lambda x: x.estimate.step_s)
    assert fastest == result.best
    for outcome in result.outcomes:
        # Two products, and three of their gradients: the rows get none.
        assert outcome.estimate.flops == outcome.plan.time.flops == 5 * 2 * 1024 * 4096**2
        assert outcome.estimate.step_s == pytest.approx(outcome.plan.time.step_s, rel=0.3)
    assert f"best on v5e-8: {fastest.candidate.name}" in str(result)
    same = planner.search(_with_own_mesh, "v5e-8", max_compiles=0, **how)
    estimates = {x.candidate.name: x.estimate for x in result.outcomes}
    assert {x.candidate.name: x.estimate for x in same.outcomes} == estimates


@pytest.mark.parametrize(
    "is_plain", [lambda x: x.remat == "full", lambda x: "fsdp" in x.replica_axes]
)
def test_each_candidate_of_a_mixture_has_the_estimate_of_its_own_step(is_plain):
    def estimate(make_step):
        how = {"geometries": [{}, {"fsdp": 8}], "remat": ["none", "full"], "max_compiles": 0}
        return {x.candidate: x.estimate for x in planner.search(make_step, "v5e-8", **how).outcomes}

    plain, both = estimate(_with_specs), estimate(make_mlp)
    found = estimate(lambda x: (_with_specs if is_plain(x) else make_mlp)(x))
    for candidate, seen in found.items():
        expected = plain if is_plain(candidate) else both
        # Without a trace that other layouts share, constraints stand between other operations.
        assert seen.step_s == pytest.approx(expected[candidate].step_s, rel=0.02)
        assert seen.flops == expected[candidate].flops


def test_a_layout_that_does_not_divide_an_array_has_no_estimate():
    def make_step(candidate):
        rows = NamedSharding(Mesh(np.array(candidate.devices), ("data",)), P("data"))
        return None, jnp.square, (jax.ShapeDtypeStruct((12, 128), jnp.float32, sharding=rows),)

    result = planner.search(make_step, "v5e-8", geometries=[{}], remat=["none"])
    (outcome,) = result.outcomes
    assert outcome.estimate is None
    assert "of shape (12, 128)" in outcome.reason


def test_a_step_of_plain_jax_has_the_slice_of_its_candidate():
    def make_step(candidate):
        return *_with_specs(candidate)[:3], {"topology": "v5e-4"}

    result = planner.search(make_step, "v5e-8", geometries=[{}], remat=["none"])
    assert "topology='v5e-4'. Omit it" in result.outcomes[0].reason


def test_the_strategy_of_plain_jax_may_be_omitted_and_too_few_parts_are_refused():
    how = {"geometries": [{}], "remat": ["none"], "max_compiles": 0}
    found = planner.search(lambda candidate: _with_specs(candidate)[1:], "v5e-8", **how)
    assert found.outcomes[0].estimate is not None
    found = planner.search(lambda candidate: None, "v5e-8", **how | {"max_compiles": 1})
    assert "make_step returned a NoneType. It must return" in found.outcomes[0].reason
    with pytest.raises(ValueError, match="list of dicts of axes"):
        planner.search(_with_specs, "v5e-8", geometries=["fsdp=8"])
