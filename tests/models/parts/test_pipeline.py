"""The pipeline over the layers computes the same result and communicates only with neighbors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import tpudist
from geometry_program import CONFIG, batches
from model_programs import sent_by_step, sent_by_step_on_tpu
from tpudist.models import Transformer, TransformerConfig, next_token_nats
from tpudist.models.parts import pipeline
from tpudist.strategy.strategy import Strategy

FOUR_LAYERS = dataclasses.replace(CONFIG, num_layers=4)


def staged(num_stages, num_microbatches=None, config=FOUR_LAYERS):
    return dataclasses.replace(
        config, pipeline_stages=num_stages, pipeline_microbatches=num_microbatches
    )


def mesh_of(num_stages):
    return Mesh(np.array(jax.devices()[:num_stages]), ("stage",), axis_types=(AxisType.Auto,))


def block(x, weight, shared):
    """Also carries a number per row, as routing does."""
    rows, count = x
    rows = rows + jnp.tanh(rows @ weight) * shared
    return rows, count + jnp.sum(rows, axis=-1)


def differentiated(num_stages, num_microbatches):
    config = TransformerConfig(
        num_layers=4, pipeline_stages=num_stages, pipeline_microbatches=num_microbatches
    )

    def loss(rows, weights, shared):
        state = pipeline.apply(block, (rows, jnp.zeros(len(rows))), weights, shared, config)
        return jnp.sum(jnp.sin(state[0])) + jnp.sum(jnp.cos(state[1])), state

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "num_rows"),
    [
        (2, 6, 11),
        *(pytest.param(*x, marks=pytest.mark.exhaustive) for x in [(2, None, 4), (4, 4, 3)]),
        (4, 8, 24),
    ],
)
def test_every_row_passes_every_layer_in_order_and_returns_to_its_place(
    num_stages, num_microbatches, num_rows
):
    """Rows are padded to full microbatches for any number of rows."""
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(num_rows, 3)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(4, 3, 3)), jnp.float32)
    want = differentiated(1, None)(rows, weights, 0.5)
    with jax.set_mesh(mesh_of(num_stages)):
        got = differentiated(num_stages, num_microbatches)(rows, weights, 0.5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_mesh_without_stages_scans_the_layers():
    text = str(
        jax.make_jaxpr(
            lambda x: pipeline.apply(block, (x, x[:, 0]), jnp.ones((4, 3, 3)), 1.0, staged(2))
        )(jnp.ones((4, 3)))
    )
    assert "length=4" in text
    assert "ppermute" not in text


def test_the_bubble_is_the_share_of_ticks_in_which_a_stage_is_idle():
    assert pipeline.bubble(staged(1)) == 0
    assert pipeline.bubble(staged(4)) == 3 / 7
    assert pipeline.bubble(staged(4, 12)) == 3 / 15


def test_a_pipeline_has_the_expected_number_of_ticks():
    """The bubble is computed from this number: microbatches plus stages minus one."""
    config = staged(4, 8)
    with jax.set_mesh(mesh_of(4)):
        text = str(
            jax.make_jaxpr(
                lambda x: pipeline.apply(block, (x, x[:, 0]), jnp.ones((4, 3, 3)), 1.0, config)
            )(jnp.ones((8, 3)))
        )
    assert "length=11" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"pipeline_stages": 3},
            r"num_layers=4 do not split equally into pipeline_stages=3.*Use one of \[1, 2, 4\] "
            r"stages, or 6 layers",
        ),
        (
            {"pipeline_stages": 4, "pipeline_microbatches": 6},
            "pipeline_microbatches=6 is not a multiple of pipeline_stages=4.*Use 8",
        ),
    ],
)
def test_stages_that_cannot_be_filled_equally_are_rejected(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(FOUR_LAYERS, **change)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_a_mesh_with_a_different_number_of_stages_is_rejected(num_stages):
    strategy = tpudist.TPUStrategy(replica_axes={"stage": 2})
    model = strategy.create_abstract(lambda: Transformer(staged(num_stages), rngs=nnx.Rngs(0)))
    words = (
        f"pipeline_stages={num_stages}, but the mesh has 2 positions along the axis 'stage'.*"
        f"Use pipeline_stages=2, or replica_axes with stage={num_stages}"
    )
    with pytest.raises(ValueError, match=words):
        lower_loss(strategy, model)


def lower_loss(strategy: Strategy, model):
    batch = strategy.replicate(batches(1)[0])
    return strategy.lower(lambda model, batch: next_token_nats(model, batch), args=(model, batch))


@pytest.mark.slow
def test_each_stage_has_its_own_layers_and_rows_are_split_over_all():
    strategy = tpudist.TPUStrategy(replica_axes={"fsdp": 2, "stage": 2})
    model = strategy.create(lambda: Transformer(staged(2), rngs=nnx.Rngs(0)))
    assert model.blocks.mlp_out[...].sharding.spec[0] == "stage"
    assert "stage" not in str(model.embedding[...].sharding.spec)
    assert strategy.replica_mesh.batch_axes == ("stage", "fsdp")


# Communication in the compiled program.

GEOMETRIES = {
    "stage=2": (staged(2), {"stage": 2}),
    "mixed": (staged(2, 4), {"fsdp": 2, "stage": 2, "tensor": 2}),
}


def assert_only_neighbours_talk(found, config, rows, length):
    across = [x for x in found if "stage" in x.axes]
    inside = [x for x in across if "while" in x.op_name]
    # In both passes: one permute to the next stage, and one of rows that wait or are finished.
    assert [x.kind for x in inside] == ["collective-permute"] * 4
    microbatches = config.pipeline_microbatches or config.pipeline_stages
    num_bytes = 4 * rows // microbatches * length * config.embed_dim
    assert {x.num_bytes for x in inside} <= {num_bytes, num_bytes // 2}
    assert {x.axes for x in inside} == {("stage",)}
    return [x for x in across if x not in inside]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stage=2", pytest.param("mixed", marks=pytest.mark.exhaustive)])
def test_only_microbatches_move_between_stages(name):
    config, axes = GEOMETRIES[name]
    found = sent_by_step(config, axes, rows=16, length=16)
    assert_only_neighbours_talk(found, config, 16, 16)


@pytest.mark.libtpu
@pytest.mark.slow
def test_only_microbatches_move_between_stages_on_tpu():
    config, axes = GEOMETRIES["mixed"]
    found = sent_by_step_on_tpu(config, axes, 16, 16, "v5e:2x4")
    assert_only_neighbours_talk(found, config, 16, 16)
