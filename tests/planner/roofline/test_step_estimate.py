"""Estimates of steps without the compiler: what products, sums, gathers and memory cost."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh

from tpudist import planner
from tpudist.planner.roofline import operation_blocks
from tpudist.planner.roofline.network import Network
from tpudist.planner.roofline.operation_blocks import StepProgram
from tpudist.planner.roofline.sharded_value import Value, reshape_axes, resize
from tpudist.planner.roofline.step_estimate import estimate
from tpudist.xla.estimate.instruction_time import COPYING_STEP_S
from tpudist.xla.hardware.chips import CHIPS

pytestmark = pytest.mark.libtpu
ROWS, WIDTH = 8192, 4096


def network(topology="v5e-8", **axes):
    devices = np.array(planner.devices(topology)).reshape(tuple(axes.values()))
    return Network(Mesh(devices, tuple(axes)), CHIPS[topology.partition("-")[0]])


def program(fn, *inputs, replaced=(None,)):
    """Traces a function of pairs of a shape and the axes of its dims, in bfloat16."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape, _ in inputs]
    block = operation_blocks.read(jax.make_jaxpr(fn)(*arrays))
    return StepProgram(block, tuple(axes for _, axes in inputs), replaced, {})


def multiply(x, w):
    return x @ w


def test_a_product_takes_its_operations_at_the_rate_of_its_chip():
    devices = network(data=8)
    step = program(multiply, ((ROWS, WIDTH), (("data",), ())), ((WIDTH, WIDTH), ((), ())))
    found = estimate(step, devices)
    assert found.flops == 2 * ROWS * WIDTH * WIDTH / 8
    assert found.flops / devices.rates.flops_per_s() <= found.step_s <= 0.25e-3
    assert found.waits_s == 0


@pytest.mark.parametrize(("is_chain", "num_sums"), [(True, 2), (False, 1)])
def test_small_sums_start_together_unless_one_follows_from_the_other(is_chain, num_sums):
    """Each batch normalization of a network waits for its own sum."""

    def step(x):
        first = x.sum(0)
        return (x - first).max(0) if is_chain else (first, x.max(0))

    devices = network(data=8)
    replaced = (None,) if is_chain else (None, None)
    found = estimate(program(step, ((ROWS, 64), (("data",), ())), replaced=replaced), devices)
    one = devices.seconds("all-reduce", 4.0, frozenset(["data"]))
    assert found.waits_s == pytest.approx(num_sums * one, rel=0.05)


@pytest.mark.parametrize(
    ("topology", "rows", "is_on_chip"),
    [("v5e-8", 1024, True), ("v5e-8", 64 * 1024, False), ("v4-16", 1024, False)],
)
def test_a_small_value_between_products_stays_on_the_chip(topology, rows, is_on_chip):
    inputs = ((8 * rows, WIDTH), (("data",), ())), ((WIDTH, 64), ((), ())), ((64, WIDTH), ((), ()))
    step = program(lambda x, a, b: jnp.tanh((x @ a) @ b) @ a, *inputs)
    found = estimate(step, network(topology, data=8))
    whole = 2 * rows * (WIDTH + 64) + 2 * 2 * 64 * WIDTH  # arguments and result
    if is_on_chip:
        assert found.hbm_bytes <= whole
        assert found.peak_bytes <= whole
    else:
        assert found.hbm_bytes >= whole + 2 * 2 * rows * WIDTH  # written and read


@pytest.mark.parametrize(("rows", "is_on_chip"), [(1024, True), (8 * 1024, False)])
def test_a_small_loop_keeps_its_values_on_the_chip(rows, is_on_chip):
    def step(x, layers):
        return jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), x), x, layers)

    inputs = ((8 * rows, 1024), (("data",), ())), ((8, 1024, 1024), ((), (), ()))
    found = estimate(program(step, *inputs, replaced=(None, None)), network(data=8))
    whole = 2 * 1024 * (rows + 8 * 1024 + 8 * rows)  # arguments and results
    assert (found.hbm_bytes <= 1.2 * whole) == is_on_chip


def test_a_sum_takes_the_memory_of_an_operand_that_ends_with_it():
    def step(x):
        total = jax.lax.sort(x) + jax.lax.cumsum(x)
        return total.sum(), total.max()

    rows = 64 * ROWS, WIDTH  # more than the memory of the chip
    step = program(step, (rows, (("data",), ())), replaced=(None, None))
    found = estimate(step, network(data=8)).peak_bytes
    assert found == pytest.approx(3 * 2 * rows[0] * rows[1] / 8, rel=0.01)


def test_loops_over_the_same_values_read_them_once():
    def step(x):
        return x.sum(1), (x * x).sum(1), (x - x.max(1, keepdims=True)).max(1)

    rows = 64 * ROWS, WIDTH  # more than the memory of the chip
    step = program(step, (rows, (("data",), ())), replaced=(None,) * 3)
    found = estimate(step, network(data=8)).hbm_bytes
    assert found == pytest.approx(2 * 2 * rows[0] * rows[1] / 8, rel=0.01)


def test_products_of_vectors_do_not_use_the_matrix_unit():
    inputs = ((ROWS, 2, WIDTH), (("data",), (), ())), ((ROWS, 2), (("data",), ()))
    step = program(lambda x, shares: jnp.einsum("rke,rk->re", x, shares), *inputs)
    found = estimate(step, network(data=8))
    assert found.flops == 0
    assert found.hbm_bytes >= 2 * 2 * ROWS * WIDTH / 8


def convolve(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def test_gradients_of_two_uses_are_added_before_their_sum_over_replicas():
    def step(x, w):
        return jax.grad(lambda w: (x @ w @ w.T).astype(jnp.float32).mean())(w)

    inputs = ((ROWS, WIDTH), (("data",), ())), ((WIDTH, WIDTH), ((), ()))
    devices = network(data=8)
    traced = program(step, *inputs, replaced=(1,))
    found = estimate(dataclasses.replace(traced, stands_in=True), devices)
    once = devices.seconds("all-reduce", 2.0 * WIDTH * WIDTH, frozenset(["data"]))
    assert found.waits_s == pytest.approx(once, rel=0.01)


def test_devices_add_up_a_product_if_one_operand_is_split_along_the_sum():
    inputs = ((ROWS, WIDTH), ((), ("tensor",))), ((WIDTH, 4 * WIDTH), ((), ()))
    devices = network(tensor=8)
    found = estimate(program(multiply, *inputs, replaced=(None,)), devices)
    summed = devices.seconds("all-reduce", 2.0 * ROWS * 4 * WIDTH, frozenset(["tensor"]))
    assert found.waits_s == pytest.approx(summed, rel=0.01)


@pytest.mark.parametrize(("images", "ratio"), [(32, 1), (128, 2)])
def test_channels_or_images_of_a_convolution_fill_their_tiles(images, ratio):
    rows = (8 * images, 64, 64)
    few, many = (
        estimate(
            program(convolve, ((*rows, n), (("data",), (), (), ())), ((3, 3, n, n), ((),) * 4)),
            network(data=8),
        ).peak_bytes
        for n in (64, 128)
    )
    assert many / few == pytest.approx(ratio, rel=0.02)


def test_a_kernel_that_is_gathered_along_its_outputs_has_its_inputs_in_lanes():
    found = {}
    for dim in (2, 3):
        axes = tuple(("fsdp",) if i == dim else () for i in range(4))
        inputs = ((512, 64, 64, 64), (("fsdp",), (), (), ())), ((3, 3, 64, 256), axes)
        found[dim] = estimate(program(convolve, *inputs), network(fsdp=8)).compute_s
    assert found[3] == pytest.approx(1.5 * found[2], rel=0.1)


def test_the_kernel_gradient_of_a_transposed_convolution_reverses_its_larger_operand():
    def step(x, w, y):
        return jax.vjp(lambda w: jax.lax.conv_transpose(x, w, (2, 2), "SAME"), w)[1](y)[0]

    axes = (("data",), (), (), ())
    small, large = (((1024, n, n, 128), axes) for n in (64, 128))
    step = program(step, small, ((4, 4, 128, 128), ((),) * 4), large)
    found = estimate(step, network(data=8)).hbm_bytes
    size = 2 * 128 * 128 * 128 * 128
    assert found == pytest.approx(3.25 * size, rel=0.02)


def test_an_update_of_a_large_value_is_written_to_it():
    def step(x, update):
        return jax.lax.dynamic_update_slice(x, jnp.tanh(update), (0, 0))

    devices = network(data=8)
    large, small = (16 * ROWS, WIDTH), (256, WIDTH)
    step = program(step, (large, ((), ())), (small, ((), ())), replaced=(0,))
    assert estimate(step, devices).hbm_bytes >= 2 * 2 * small[0] * small[1]


@pytest.mark.parametrize(
    ("axes", "num_rounds", "kind"),
    [
        ({"fsdp": 8}, 1, "all-reduce"),
        ({"fsdp": 8}, 2, "all-reduce"),
        ({"fsdp": 4, "tensor": 2}, 1, "all-gather"),
    ],
)
def test_the_gradient_of_a_table_moves_its_rows_or_itself(axes, num_rounds, kind):
    """XLA adds up the results of a scatter, once after a loop, if its rows are on all devices."""
    table, width, num_ids = 2**15, 128, 4096

    def step(rows, ids):
        zeros = jnp.zeros((table, width), jnp.bfloat16)

        def add(total, _):
            return total + zeros.at[ids[:, 0].astype(jnp.int32)].add(rows), None

        return jax.lax.scan(add, zeros, length=num_rounds)[0] if num_rounds > 1 else add(zeros, 0)

    devices = network(**axes)
    ids = (num_ids, 1), (("fsdp",), ())
    found = estimate(program(step, ((num_ids, width), (("fsdp",), ())), ids), devices)
    moved = num_ids if kind == "all-gather" else table
    moved_s = devices.seconds(kind, 2.0 * moved * width, frozenset(["fsdp"]))
    assert found.waits_s == pytest.approx(moved_s)


def test_the_vector_units_take_their_operations():
    """A product hides those of the loop that it contains."""

    def chain(x):
        for _ in range(400):
            x = jnp.tanh(x)
        return x

    devices = network(data=8)
    rows, weights = ((ROWS, WIDTH), (("data",), ())), ((WIDTH, WIDTH), ((), ()))
    _, vector_s = devices.rates.unit_seconds(0, 0, 400 * ROWS * WIDTH / 8)
    assert vector_s <= estimate(program(chain, rows), devices).step_s <= 1.1 * vector_s
    found = estimate(program(lambda x, w: chain(x @ w), rows, weights), devices)
    assert found.step_s < 1.01 * estimate(program(multiply, rows, weights), devices).step_s


@pytest.mark.parametrize("gathers", [True, False])
def test_each_row_of_a_gather_or_scatter_takes_its_cycles(gathers):
    """Rows of two numbers take longer than their bytes."""
    rows = 2**20

    def step(table, ids):
        places = ids[:, 0].astype(jnp.int32)
        return table[places] if gathers else jnp.zeros((64, 2), jnp.bfloat16).at[places].add(1)

    devices = network(data=8)
    found = estimate(program(step, ((64, 2), ((), ())), ((rows, 1), ((), ()))), devices)
    least_s = 8 * rows / devices.chip.cycles_per_s
    assert least_s <= found.step_s <= 1.3 * least_s


@pytest.mark.parametrize(("num_ids", "is_summed"), [(1024, True), (2**21, False)])
def test_the_larger_operand_of_a_lookup_decides_its_sharding(num_ids, is_summed):
    """A table that is split along its width splits its rows so, if no constraint gathers it."""

    def step(table, ids, weights):
        return table[ids[:, 0].astype(jnp.int32)] @ weights

    ids = (num_ids, 1), (("fsdp",), ())
    inputs = ((2**15, 128), ((), ("fsdp",))), ids, ((128, 128), (("fsdp",), ()))
    devices = network(fsdp=8)
    summed = devices.seconds("all-reduce", 2.0 * num_ids * 128, frozenset(["fsdp"]))
    assert (estimate(program(step, *inputs), devices).waits_s >= summed) == is_summed


def test_the_gradient_of_split_logits_is_split_where_the_label_is_read():
    """It is a scatter into zeros, which has the size of all logits if nothing splits it."""

    def step(x, w, ids):
        def loss(w):
            logits = x @ w
            own = jnp.take_along_axis(logits, ids.astype(jnp.int32)[:, None], axis=1)[:, 0]
            return (jax.nn.logsumexp(logits, axis=1) - own).sum()

        return jax.grad(loss)(w)

    vocabulary, split = 64 * 1024, ("tensor",)
    inputs = ((ROWS, 256), ((), ())), ((256, vocabulary), ((), split)), ((ROWS,), ((),))
    found = estimate(program(step, *inputs), network(tensor=8))
    assert found.peak_bytes < 4 * 2 * ROWS * vocabulary / 8


def test_a_manual_gather_has_the_sizes_of_the_devices():
    """A trace for all layouts has two devices along each axis."""
    devices = network(fsdp=8)
    mesh = jax.sharding.AbstractMesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("fsdp")

    def gather(w):
        return jax.lax.all_gather(w, "fsdp", tiled=True)

    step = jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=spec)
    traced = program(step, ((WIDTH, WIDTH), (("fsdp",), ())))
    found = estimate(dataclasses.replace(traced, traced={"fsdp": 2}), devices)
    gathered = devices.seconds("all-gather", 2.0 * WIDTH * WIDTH, frozenset(["fsdp"]))
    assert found.waits_s == pytest.approx(gathered)


@pytest.mark.parametrize("joins", [False, True])
def test_parts_of_a_split_dim_stay_split(joins):
    """XLA exchanges the parts of slices. To join values, it splits them along another dim."""

    def step(x):
        first, second = (x, x + 1) if joins else jnp.split(x, 2, axis=1)
        return jnp.concatenate([first, second], axis=1) if joins else first * second

    devices, axes = network(tensor=8), frozenset(["tensor"])
    found = estimate(program(step, ((ROWS, WIDTH), ((), ("tensor",)))), devices)
    size = 2.0 * ROWS * WIDTH / 8
    exchanges = [size, size, 2 * size] if joins else [size / 2, size / 2]
    kind = "all-to-all" if joins else "collective-permute"
    assert found.waits_s == pytest.approx(sum(devices.seconds(kind, x, axes) for x in exchanges))


def test_operands_that_are_all_repeated_split_their_result():
    def step(x, y, w):
        return (x * y) @ w

    devices = network(data=8)
    rows = (ROWS, 1), (("data",), ())
    step = program(step, rows, ((1, WIDTH), ((), ())), ((WIDTH, WIDTH), ((), ())))
    assert estimate(step, devices).flops == 2 * ROWS * WIDTH * WIDTH / 8


def test_a_product_over_a_split_dim_is_summed():
    devices = network(tensor=8)
    step = program(
        multiply, ((ROWS, WIDTH), ((), ("tensor",))), ((WIDTH, WIDTH), (("tensor",), ()))
    )
    found = estimate(step, devices)
    summed = devices.seconds("all-reduce", 2.0 * ROWS * WIDTH, frozenset(["tensor"]))
    assert found.waits_s == pytest.approx(summed)


def test_products_that_are_added_are_summed_over_devices_once():
    devices = network(tensor=8)
    rows, weights = ((ROWS, WIDTH), ((), ("tensor",))), ((WIDTH, WIDTH), (("tensor",), ()))
    step = program(lambda x, a, b: x @ a + x @ b, rows, weights, weights)
    summed = devices.seconds("all-reduce", 2.0 * ROWS * WIDTH, frozenset(["tensor"]))
    assert estimate(step, devices).waits_s == pytest.approx(summed)


@pytest.mark.parametrize(("topology", "is_hidden"), [("v5e-8", True), ("v6e-8", False)])
def test_split_weights_are_gathered_and_hidden_where_the_compiler_does(topology, is_hidden):
    """No product runs while the first weight is gathered."""
    devices = network(topology, fsdp=8)
    rows, weights = ((8 * ROWS, WIDTH), (("fsdp",), ())), ((WIDTH, WIDTH), (("fsdp",), ()))
    found = estimate(program(lambda x, a, b: x @ a @ b, rows, weights, weights), devices)
    gathered = devices.seconds("all-gather", 2.0 * WIDTH * WIDTH, frozenset(["fsdp"]))
    assert found.flops == 4 * ROWS * WIDTH * WIDTH
    assert found.waits_s == pytest.approx(gathered if is_hidden else 2 * gathered)


def test_a_gradient_is_summed_over_the_axis_of_the_rows():
    def step(w, x):
        return w - jax.grad(lambda w: (x @ w).astype(jnp.float32).mean())(w)

    inputs = ((WIDTH, WIDTH), ((), ())), ((ROWS, WIDTH), (("data",), ()))
    devices = network(data=8)
    found = estimate(program(step, *inputs, replaced=(0,)), devices)
    summed = devices.seconds("all-reduce", 2.0 * WIDTH * WIDTH, frozenset(["data"]))
    assert found.waits_s == pytest.approx(summed)


@pytest.mark.parametrize(
    ("topology", "num_devices", "kind"),
    [("v5e-8", 8, "reduce-scatter"), ("v5e-16", 16, "all-reduce")],
)
def test_a_gradient_of_split_weights_is_scattered_where_the_compiler_does(
    topology, num_devices, kind
):
    """A sum over a complete 4x4 slice is an all-reduce. Each device then keeps its part."""

    def step(w, x):
        return w - jax.grad(lambda w: (x @ w).astype(jnp.float32).mean())(w)

    devices = network(topology, fsdp=num_devices)
    inputs = ((WIDTH, WIDTH), (("fsdp",), ())), ((8 * ROWS, WIDTH), (("fsdp",), ()))
    found = estimate(program(step, *inputs, replaced=(0,)), devices)
    summed = devices.seconds(kind, 2.0 * WIDTH * WIDTH, frozenset(["fsdp"]))
    assert found.waits_s == pytest.approx(summed)


def test_stacked_gradients_are_summed_over_replicas_once():
    def step(w, x):
        def loss(a, b):
            return ((x @ a) * (x @ b)).astype(jnp.float32).mean()

        return w - jnp.stack(jax.grad(loss, (0, 1))(*w))

    devices = network(data=8)
    inputs = ((2, WIDTH, WIDTH), ((), (), ())), ((ROWS, WIDTH), (("data",), ()))
    replicas = dataclasses.replace(program(step, *inputs, replaced=(0,)), stands_in=True)
    summed = devices.seconds("all-reduce", 2 * 2.0 * WIDTH * WIDTH, frozenset(["data"]))
    assert estimate(replicas, devices).waits_s == pytest.approx(summed)


@pytest.mark.parametrize(("first", "is_exchanged"), [("fsdp", True), ("data", False)])
def test_weights_that_swap_axes_share_the_sharding_of_a_constant(first, is_exchanged):
    """The compiler merges equal constants, so it exchanges whole parts of the second weight."""

    def step(a, b):
        return 0.5 * a, 0.5 * b

    devices = network(data=2, fsdp=2, tensor=2)
    inputs = [
        ((WIDTH, WIDTH), ((first,), ("tensor",))),
        ((WIDTH, WIDTH), (("tensor",), ("fsdp",))),
    ]
    found = estimate(program(step, *inputs, replaced=(0, 1)), devices)
    part = 2.0 * WIDTH * WIDTH / 4
    sent = devices.seconds("collective-permute", part, frozenset(["fsdp", "tensor"]))
    assert found.waits_s == pytest.approx(2 * sent if is_exchanged else 0)


def test_a_manual_permute_sends_to_the_next_device():
    devices = network(ring=4, data=2)
    automatic = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((4, 2), ("ring", "data"), axis_types=automatic)
    spec = jax.sharding.PartitionSpec("ring")

    def shift(x):
        return jax.lax.ppermute(x, "ring", [(i, (i + 1) % 4) for i in range(4)])

    step = jax.shard_map(shift, mesh=mesh, in_specs=spec, out_specs=spec)
    found = estimate(program(step, ((ROWS, WIDTH), (("ring",), ()))), devices)
    part = 2.0 * ROWS * WIDTH / 4
    assert found.waits_s == pytest.approx(
        devices.seconds("collective-permute", part, frozenset(["ring"]))
    )


def test_a_manual_permute_runs_during_products_that_do_not_need_it():
    devices = network(ring=8)
    mesh = jax.sharding.AbstractMesh((8,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("ring")

    def waits(step):
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(spec, None), out_specs=spec)
        inputs = ((8 * ROWS, WIDTH), (("ring",), ())), ((WIDTH, WIDTH), ((), ()))
        return estimate(program(mapped, *inputs), devices).waits_s

    def shift(x):
        return jax.lax.ppermute(x, "ring", [(i, (i + 1) % 8) for i in range(8)])

    sent = devices.seconds("collective-permute", 2.0 * ROWS * WIDTH, frozenset(["ring"]))
    assert waits(lambda x, w: shift(x) @ w) == pytest.approx(sent)
    assert waits(lambda x, w: shift(x) + x @ w) == 0


def test_a_kernel_takes_the_time_of_its_grid():
    def double(x):
        def body(x_ref, out_ref):
            out_ref[...] = 2 * x_ref[...]

        spec = pl.BlockSpec((8, WIDTH), lambda i: (i, 0))
        return pl.pallas_call(
            body, out_shape=x, grid=(ROWS // 8,), in_specs=[spec], out_specs=spec
        )(x)

    found = estimate(program(double, ((ROWS, WIDTH), ((), ()))), network(data=8))
    assert found.compute_s == pytest.approx(ROWS // 8 * COPYING_STEP_S)


def test_a_loop_multiplies_its_body_and_keeps_its_stacked_results():
    def step(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, ws)[1]

    devices = network(data=8)
    inputs = ((ROWS, WIDTH), (("data",), ())), ((6, WIDTH, WIDTH), ((), (), ()))
    found = estimate(program(step, *inputs), devices)
    rows = 2 * ROWS * WIDTH / 8
    weights = 6 * 2 * WIDTH * WIDTH
    assert found.flops == 6 * 2 * ROWS * WIDTH * WIDTH / 8
    assert 0 <= found.peak_bytes - (weights + rows + 6 * rows) <= 3 * rows


@pytest.mark.parametrize(
    ("before", "after", "axes", "expected"),
    [
        ((8, 4, 6), (32, 6), (("a",), (), ()), (("a",), ())),
        ((32, 6), (8, 4, 6), (("a",), ()), (("a",), (), ())),
        ((6, 32), (6, 8, 4), ((), ("a", "b")), ((), ("a", "b"), ())),
        ((1, 32), (32,), ((), ("a",)), (("a",),)),
        ((2, 4), (8,), ((), ("a",)), ((),)),  # the rows would be mixed
    ],
)
def test_a_reshape_keeps_the_axes_of_its_outer_dims(before, after, axes, expected):
    sizes = {"a": 4, "b": 2}
    local = tuple(
        n // int(np.prod([sizes[x] for x in names])) for n, names in zip(before, axes, strict=True)
    )
    found, _ = reshape_axes(before, after, Value(local, axes, 1.0), sizes)
    assert found == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 1, 4096), (8, 1, 2048)),
        ((4, 3), (4, 3)),
        ((6, 4096), (6, 4096)),
    ],
)
def test_a_dim_per_device_has_the_devices_of_the_estimate(shape, expected):
    axes = (("data", "fsdp"), *[()] * (len(shape) - 1))
    assert resize(shape, axes, {"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 2}) == expected


def test_the_rest_of_a_dim_per_device_is_not_in_a_split_dim():
    axes = (("fsdp",), ("sequence",), ())
    sizes = {"fsdp": 4, "sequence": 2}
    assert resize((2, 2, 8), axes, sizes, {"fsdp": 2, "sequence": 2}) == (4, 2, 4)


def test_rows_of_a_larger_axis_stay_on_one_device():
    found, shape = reshape_axes((64, 5), (4, 16, 5), Value((1, 5), (("a",), ()), 1.0), {"a": 64})
    assert (found, shape) == ((("a",), (), ()), (1, 1, 5))


def test_the_gradient_of_picked_elements_is_split_like_their_rows():
    """Such as the labels of a cross-entropy: a device has no zeros for the rows of others."""

    def step(x):
        picked = jnp.argmax(x, axis=1, keepdims=True)
        return jax.grad(lambda x: jnp.take_along_axis(x, picked, axis=1).sum())(x)

    found = estimate(program(step, ((ROWS, WIDTH), (("data",), ()))), network(data=8))
    assert found.peak_bytes <= 2.1 * 2 * ROWS * WIDTH / 8
