import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import tpudist
from tpudist.models import Transformer, TransformerConfig, next_token_nats
from tpudist.planner import GlobalBatch
from tpudist.training.steps import make_train_step
from tpudist.xla import topology
from tpudist.xla.compiler import compiler_options, compiler_process
from tpudist.xla.hardware.chips import CHIPS

rare = pytest.mark.exhaustive
# The smallest slices with every collective; the test adds a program for two slices.
SLICES = ["v2:2x2", "v3:2x2", "v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
# These run every time; the others are exhaustive.
IN_EVERY_RUN = ("v6e:2x2", "tpu7x:2x2x1", "2xv5e:2x1")


def _train(devices):
    """A scan over two layers, split and replicated: gathers, scatters and reduces gradients."""
    grid = np.array(devices).reshape(2, -1)
    mesh = Mesh(grid, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def shape(dtype, spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    def step(weights, x):
        def loss(weights):
            def layer(hidden, weights):
                return hidden + jax.nn.relu(hidden @ weights.astype(jnp.bfloat16)), None

            return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    weights = shape(jnp.float32, P(None, "fsdp"), 2, 512, 512)
    x = shape(jnp.bfloat16, P(("data", "fsdp")), 1024, 512)
    step = jax.jit(step, donate_argnums=0, out_shardings=weights.sharding)
    return step.lower(weights, x), mesh


@pytest.mark.libtpu
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in IN_EVERY_RUN else rare) for x in (*SLICES, "2xv5e:2x1")],
)
def test_the_compiler_accepts_the_options_of_every_chip(name):
    """The table must not contain an option that libtpu rejects for a chip."""
    devices = topology.devices(name)
    num_slices = 2 if name.startswith("2x") else 1
    options = compiler_options.options_for_chip(name.removeprefix("2x").split(":")[0], num_slices)
    lowered, mesh = _train(devices)
    program = compiler_process.compile_elsewhere(lowered, mesh.devices, options)
    assert program.memory.peak_bytes > 0


@pytest.mark.libtpu
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["v4-16", "v5e-8", "v5p-16", "v6e-8", "tpu7x-8"])
def test_a_split_transformer_compiles_and_has_a_cost_on_every_chip(name):
    """Without its options, libtpu crashes with a segmentation fault on TPU7x."""
    strategy = tpudist.TPUStrategy(
        replica_axes={"fsdp": 4, "tensor": 2}, devices=tpudist.planner.devices(name)
    )
    config = TransformerConfig(num_layers=2, dtype="bfloat16", remat="full", loss_chunk=128)
    model = strategy.create_abstract(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    optimizer = strategy.create_abstract(lambda m: tpudist.Optimizer(optax.adamw(1e-3), m), model)
    batch = GlobalBatch(jax.ShapeDtypeStruct((16, 513), jnp.int32))
    step = make_train_step(lambda model, x: next_token_nats(model, x).mean(axis=-1))
    plan = strategy.plan(step, (model, optimizer, batch), cache=False)
    kinds = {use.kind for use in plan.collectives if use.num_bytes > 2**10}
    assert "all-gather" in kinds
    assert kinds & {"all-reduce", "reduce-scatter"}
    assert 1e-5 < plan.time.step_s < 1e-1


def test_every_option_has_a_reason_and_its_chips():
    names = [(x.name, chip) for x in compiler_options.OPTIONS for chip in x.generations]
    assert len(names) == len(set(names))
    for option in compiler_options.OPTIONS:
        assert option.reason.endswith(".")
        assert option.generations
        assert set(option.generations) <= set(CHIPS)


@pytest.mark.parametrize("generation", CHIPS)
def test_programs_for_several_slices_have_additional_options(generation):
    one, two = (compiler_options.options_for_chip(generation, number) for number in (1, 2))
    assert one.items() < two.items()
    assert compiler_options.options_for_chip(CHIPS[generation]) == one


def test_devices_that_are_not_tpus_have_no_options():
    assert compiler_options.options_for_chip(None) == {}
    with pytest.raises(ValueError, match=r"'v8' is not a TPU generation. Use one of v2, v3"):
        compiler_options.options_for_chip("v8")


def _gathers_on_v6e():
    mesh = Mesh(np.array(topology.devices("v6e-8")), ("fsdp",), axis_types=(AxisType.Auto,))

    def shape(dtype, spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    def step(weights, x):
        def layer(x, w):
            up, down = (part.astype(jnp.bfloat16) for part in w)
            return x + jax.nn.silu(x @ up) @ down, None

        return jax.lax.scan(layer, x, weights)[0]

    split = P(None, "fsdp")
    weights = (
        shape(jnp.float32, split, 3, 4096, 14336),
        shape(jnp.float32, split, 3, 14336, 4096),
    )
    x = shape(jnp.bfloat16, P("fsdp"), 8 * 8192, 4096)
    options = compiler_options.options_for_chip("v6e")
    del options["xla_tpu_scoped_vmem_limit_kib"]  # takes minutes
    return jax.jit(step, out_shardings=x.sharding).lower(weights, x), mesh, options


@pytest.mark.libtpu
@pytest.mark.skipif(
    compiler_options._libtpu() > (0, 0, 42), reason="libtpu refuses the option since 0.0.50"
)
@pytest.mark.slow
def test_v6e_gathers_weights_while_it_computes():
    """Other chips do this by default. The two options have no effect separately."""
    lowered, _, options = _gathers_on_v6e()

    def beside(without=None):
        chosen = {name: value for name, value in options.items() if name != without}
        return lowered.compile(compiler_options=chosen).as_text().count("AsyncCollectiveStart")

    assert beside() > 0
    for name in (
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_enable_async_all_gather",
    ):
        assert beside(without=name) == 0


@pytest.mark.libtpu
@pytest.mark.skipif(compiler_options._libtpu() < (0, 0, 50), reason="for newer libtpus")
@pytest.mark.slow
def test_v6e_gathers_weights_on_sparse_cores():
    lowered, mesh, options = _gathers_on_v6e()

    def on_sparse_cores(options):
        program = compiler_process.compile_elsewhere(
            lowered, mesh.devices, options, with_code=False
        )
        return program.text.count('async_execution_thread="sparsecore"')

    assert on_sparse_cores(options) > 0
    others = {name: value for name, value in options.items() if "all_gather" not in name}
    assert on_sparse_cores(others) == 0


def test_v6e_computes_in_larger_tiles_and_without_collective_matmul():
    options = compiler_options.options_for_chip("v6e")
    assert options["xla_tpu_scoped_vmem_limit_kib"] * 1024 < 128 * 1024**2
    assert math.isclose(options["xla_jf_spmd_threshold_for_windowed_einsum_mib"], 1e6)


@pytest.mark.parametrize(("libtpu", "has"), [((0, 0, 42), True), ((0, 0, 50), False)])
def test_an_option_that_newer_libtpus_reject_is_used_only_with_older_ones(libtpu, has, monkeypatch):
    monkeypatch.setattr(compiler_options, "_libtpu", lambda: libtpu)
    gathers = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
    sinks = "xla_tpu_enable_sunk_dcn_allreduce_done_with_host_reduction"
    assert (gathers in compiler_options.options_for_chip("v6e")) == has
    on_sparse_cores = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
    assert (on_sparse_cores in compiler_options.options_for_chip("v6e")) != has
    assert (sinks in compiler_options.options_for_chip("v5e", 2)) == has
    assert "xla_tpu_data_parallel_opt_different_sized_ops" in compiler_options.options_for_chip(
        "v5e", 2
    )
