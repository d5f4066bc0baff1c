"""The memory of a program at its peak, by category, adds up to the compiler's figure."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import tpudist
from tpudist.models import MLP, Transformer, TransformerConfig, next_token_nats
from tpudist.planner import GlobalBatch
from tpudist.training.steps import make_train_step
from tpudist.xla import topology
from tpudist.xla.compiler import compiler_process
from tpudist.xla.estimate import memory
from tpudist.xla.estimate.memory import InputLeaf
from tpudist.xla.hardware import chips
from tpudist.xla.hardware.chips import CHIPS
from tpudist.xla.hlo import hlo_module, liveness

BATCH = 16
SMALL = TransformerConfig(num_layers=2, embed_dim=64, num_heads=4, mlp_dim=128)
# model, loss per example, one example
TASKS = {
    "mlp": (
        lambda: MLP((128, 512, 128), rngs=nnx.Rngs(0)),
        lambda model, x: jnp.square(model(x) - x).mean(axis=-1),
        jax.ShapeDtypeStruct((BATCH, 128), jnp.float32),
    ),
    "transformer": (
        lambda: Transformer(SMALL, rngs=nnx.Rngs(0)),
        lambda model, tokens: next_token_nats(model, tokens).mean(axis=-1),
        jax.ShapeDtypeStruct((BATCH, 33), jnp.uint8),
    ),
}
GEOMETRIES = {
    "data parallel": None,
    "fsdp": {"fsdp": 4},
    "fsdp and tensor": {"fsdp": 2, "tensor": 2},
}


def bytes_on_a_device(tree) -> int:
    leaves = jax.tree.leaves(nnx.state(tree))
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def check_that_it_adds_up(task: str, geometry: str, slice_name: str | None) -> None:
    make_model, loss, batch = TASKS[task]
    strategy = tpudist.TPUStrategy(replica_axes=GEOMETRIES[geometry])
    if slice_name:
        strategy = strategy.on(topology.devices(slice_name))
    model = strategy.create_abstract(make_model)
    optimizer = strategy.create_abstract(
        lambda model: tpudist.Optimizer(optax.adamw(1e-3), model), model
    )
    step = make_train_step(loss)
    plan = strategy.plan(step, (model, optimizer, GlobalBatch(batch)), cache=False)
    report = plan.memory
    sizes = report.categories
    assert sum(sizes.values()) == report.peak_bytes
    assert min(sizes.values()) >= 0
    padding = report.padding_bytes
    parameters = bytes_on_a_device(model)
    state = bytes_on_a_device(optimizer)
    assert sizes["parameters"] - padding.get("parameters", 0) == parameters
    assert sizes["optimizer state"] - padding.get("optimizer state", 0) in (state, state - 4)
    assert report.not_donated == ()
    # All state that a step replaces is overwritten in place.
    replaced = sizes["parameters"] + sizes["optimizer state"]
    assert report.donated_bytes == pytest.approx(replaced, rel=0.01)
    assert report.allocated_bytes >= report.peak_bytes


def cases(task: str, geometry: str) -> pytest.MarkDecorator:
    """Parametrizes a test by all tasks and geometries; only the given pair runs every time."""
    return pytest.mark.parametrize(
        ("task", "geometry"),
        [
            pytest.param(*case, marks=() if case == (task, geometry) else pytest.mark.exhaustive)
            for case in itertools.product(TASKS, GEOMETRIES)
        ],
    )


@pytest.mark.slow
@cases("mlp", "fsdp and tensor")
def test_categories_add_up_on_emulated_devices(task, geometry):
    check_that_it_adds_up(task, geometry, None)


@pytest.mark.libtpu
@pytest.mark.slow
@cases("transformer", "fsdp")
def test_categories_add_up_on_a_slice(task, geometry):
    check_that_it_adds_up(task, geometry, "v5e:2x4")


# One program, in detail.


def momentum_step(weights, momentum, x):
    def loss(weights):
        def layer(h, w):
            return jnp.tanh(h @ w), h.sum()

        h, _ = jax.lax.scan(layer, x, weights)
        return jnp.square(h).sum()

    momentum = 0.9 * momentum + jax.grad(loss)(weights)
    return weights - 0.1 * momentum, momentum


@functools.cache
def mesh_of(slice_name: str = "v5e:2x2", num_replicas: int = 2) -> jax.sharding.Mesh:
    devices = topology.devices(slice_name)
    shape = (num_replicas, len(devices) // num_replicas)
    return jax.make_mesh(
        shape, ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )


def leaf(name, role, shape, spec=None, *, mesh=None, donated=False, kind=None):
    sharding = NamedSharding(mesh or mesh_of(), spec or P(), memory_kind=kind)
    return InputLeaf(name, role, shape, jnp.dtype(jnp.float32), sharding, donated)


def lowered(function, inputs, **options):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in inputs]
    donated = tuple(i for i, x in enumerate(inputs) if x.donated)
    return jax.jit(function, donate_argnums=donated, **options).lower(*shapes)


def compiled(function, inputs, **options):
    return compiler_process.compile_here(lowered(function, inputs, **options))


def report_on(program, inputs, mesh):
    chip = chips.chip_of_device(mesh.devices.flat[0])
    return memory.report(program, hlo_module.parse(program.text), inputs, chip, mesh)


def reported(function, *inputs):
    return report_on(compiled(function, inputs), inputs, inputs[0].sharding.mesh)


@functools.cache
def a_large_step():
    stack = (4, 4096, 4096)
    inputs = [
        leaf("weights", "parameters", stack, P(None, "fsdp"), donated=True),
        leaf("momentum", "optimizer state", stack, P(None, "fsdp"), donated=True),
        leaf("x", "batch", (8192, 4096), P(("replica", "fsdp"))),
    ]
    step = lowered(momentum_step, inputs)
    program = compiler_process.compile_here(step)
    return program, step, report_on(program, inputs, mesh_of())


@pytest.mark.slow
@pytest.mark.libtpu
def test_the_peak_matches_the_compiler_and_the_arguments_match_their_sizes():
    _, step, report = a_large_step()
    found = step.compile().memory_analysis()
    assert report.peak_bytes == pytest.approx(found.peak_memory_in_bytes, rel=0.001)
    assert report.donated_bytes == found.alias_size_in_bytes == 4 * 4 * 4096 * 4096
    sizes = report.categories
    assert sizes["parameters"] == sizes["optimizer state"] == 4 * 4 * 2048 * 4096
    assert (sizes["batch"], sizes["other arguments"]) == (4 * 2048 * 4096, 0)
    assert sum(sizes.values()) == report.peak_bytes
    assert sizes["outputs"] < 1024  # both outputs reuse the memory of an argument
    assert report.capacity_bytes == round(15.75 * 2**30)
    assert report.peak_bytes <= report.allocated_bytes < 1.1 * report.peak_bytes
    used = report.allocated_bytes + report.program_bytes
    assert report.free_bytes == report.capacity_bytes - used


@pytest.mark.slow
@pytest.mark.libtpu
def test_temporaries_at_the_peak_match_the_compiler():
    program, _, report = a_large_step()
    peak, _ = liveness.peak(liveness.temporaries(program.buffers))
    assert peak == pytest.approx(report.categories["gradients and activations"], rel=0.001)
    named = sum(x.num_bytes for x in report.largest)
    assert named == pytest.approx(peak, rel=0.01)


@pytest.mark.slow
@pytest.mark.libtpu
def test_the_largest_temporaries_have_their_source_line():
    _, _, report = a_large_step()
    first = report.largest[0]
    # An activation of each of four layers; buffers of the same line count as one.
    assert first.shape.startswith("f32[4,2048,4096]")
    assert first.unpadded_bytes >= 4 * 4 * 2048 * 4096
    assert "while/body" in first.op_name
    file, _, line = first.source.rpartition(":")
    start = momentum_step.__code__.co_firstlineno
    assert file == __file__
    assert start < int(line) < start + 8


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_cast_of_an_argument_has_the_name_of_the_argument():
    """The compiler added it, so it has no operation or line of its own."""
    _, _, report = a_large_step()
    assert "weights" in {x.op_name for x in report.largest if x.source is None}


@pytest.mark.libtpu
def test_padding_from_tiling_is_reported():
    inputs = leaf("x", "batch", (64, 8, 2)), leaf("w", "parameters", (128, 128))
    report = reported(lambda x, w: (x * 2, w * 2), *inputs)
    assert report.categories["batch"] == report.padding_bytes["batch"] + 4 * 64 * 8 * 2
    assert report.padding_bytes["batch"] > 0
    assert "parameters" not in report.padding_bytes


@pytest.mark.libtpu
def test_a_donated_argument_that_fits_no_output_is_named():
    used = leaf("used", "parameters", (256, 256), donated=True)
    unused = leaf("unused", "other", (128, 128), donated=True)
    assert reported(lambda a, b: a + b.sum(), used, unused).not_donated == ("unused",)


@pytest.mark.libtpu
def test_parameters_replicated_on_every_device_of_a_replica_are_named():
    inputs = [
        leaf("split", "parameters", (768, 128), P("fsdp")),
        leaf("scale", "parameters", (128,)),
        leaf("table", "parameters", (255, 128)),
        leaf("mean", "other", (128,)),
    ]

    report = reported(lambda *arrays: sum(x.sum() for x in arrays), *inputs)
    assert report.replicated == ("table", "scale")
    assert report.replicated_share == 256 / (256 + 768)


@pytest.mark.libtpu
def test_one_device_per_replica_leaves_nothing_replicated():
    w = leaf("w", "parameters", (128, 128), mesh=mesh_of(num_replicas=4))
    report = reported(lambda w: w + 1, w)
    assert (report.replicated_share, report.replicated) == (0.0, ())


@pytest.mark.libtpu
def test_host_memory_is_reported_separately():
    inputs = [
        leaf("moments", "optimizer state", (2048, 1024), P("fsdp"), kind="pinned_host"),
        leaf("w", "parameters", (2048, 1024), P("fsdp")),
    ]

    def update(moments, w):
        here = NamedSharding(mesh_of(), P("fsdp"), memory_kind="device")
        return w + jax.device_put(moments, here)

    report = reported(update, *inputs)
    assert report.host_bytes == 4 * 1024 * 1024
    assert report.categories["parameters"] == 4 * 1024 * 1024
    assert report.categories.get("optimizer state", 0) == 0
    assert sum(report.categories.values()) == report.peak_bytes


@functools.cache
def a_step_with_state_on_the_host():
    mesh = mesh_of()
    there = NamedSharding(mesh, P(None, "fsdp"), memory_kind="pinned_host")
    here = NamedSharding(mesh, P(None, "fsdp"), memory_kind="device")
    inputs = [
        leaf(
            "moments",
            "optimizer state",
            (4096, 4096),
            P(None, "fsdp"),
            donated=True,
            kind="pinned_host",
        ),
        leaf("w", "parameters", (1024, 4096), P(None, "fsdp")),
    ]

    def update(moments, w):
        return 0.9 * jax.device_put(moments, here) + w.mean(), w.sum()

    return compiled(update, inputs, out_shardings=(there, None)), inputs


@pytest.mark.libtpu
def test_state_overwritten_in_host_memory_is_counted_once():
    report = report_on(*a_step_with_state_on_the_host(), mesh_of())
    assert report.not_donated == ()
    assert report.host_bytes == 4 * 4096 * 2048


@pytest.mark.libtpu
def test_host_memory_is_not_counted_as_device_memory_without_buffers():
    program, inputs = a_step_with_state_on_the_host()
    report = report_on(dataclasses.replace(program, buffers=""), inputs, mesh_of())
    stats = program.memory
    held = stats.argument_bytes + stats.output_bytes - stats.alias_bytes
    assert held <= report.peak_bytes <= held + stats.temp_bytes
    assert min(report.categories.values()) >= 0
    assert sum(report.categories.values()) == report.peak_bytes


@pytest.mark.slow
@pytest.mark.libtpu
def test_vmem_of_a_small_program_is_not_counted_as_hbm():
    report = reported(
        momentum_step,
        leaf("w", "parameters", (4, 512, 512)),
        leaf("m", "optimizer state", (4, 512, 512)),
        leaf("x", "batch", (512, 512)),
    )
    kept = 4 * (9 + 8) * 512 * 512  # nothing is donated
    assert kept <= report.peak_bytes <= report.allocated_bytes < 1.1 * kept
    assert sum(report.categories.values()) == report.peak_bytes


@pytest.mark.libtpu
def test_two_devices_share_the_memory_of_a_chip():
    w = leaf("w", "parameters", (128, 128), mesh=mesh_of("tpu7x:2x2x1"))
    report = reported(lambda w: w + 1, w)
    assert report.capacity_bytes == CHIPS["tpu7x"].compiler_hbm_bytes // 2


@pytest.mark.slow
@pytest.mark.libtpu
def test_arguments_without_a_description_are_other_arguments():
    program, _, report = a_large_step()
    unknown = report_on(program, [], mesh_of())
    assert unknown.peak_bytes == report.peak_bytes
    arguments = ("parameters", "optimizer state", "batch")
    assert unknown.categories["other arguments"] == sum(report.categories[x] for x in arguments)
