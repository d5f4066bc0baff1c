"""The grid, blocks and operations of Pallas kernels are read from the compiled program."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
    splash_attention_mask as masks,
)

import hlo_programs
from tpudist.xla.estimate import error_bar, hbm_traffic, instruction_time, kernels, timeline
from tpudist.xla.hardware import chips
from tpudist.xla.hlo import kernel_bodies
from tpudist.xla.hlo.kernel_bodies import Product

V5E, V5P, V6E = (chips.CHIPS[name] for name in ("v5e", "v5p", "v6e"))
SQUARE = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)


def _body(kernel, *shapes):
    """The text of the program of a kernel, as it is in a compiled program; needs no TPU."""
    text = jax.jit(kernel).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    return re.search(r"\\22body\\22: ?\\22([^\\]+)\\22", text)[1]


@functools.cache
def _matmul(rows, columns, depth):
    size = SQUARE.shape[0]

    def kernel(x, w, y, total):
        @pl.when(pl.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == size // depth - 1)
        def _():
            y[...] = total[...].astype(y.dtype)

    call = pl.pallas_call(
        kernel,
        out_shape=SQUARE,
        grid=(size // rows, size // columns, size // depth),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, j, k: (i, k)),
            pl.BlockSpec((depth, columns), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
    )
    return _body(call, SQUARE, SQUARE)


def _compiled(body, *operands, result="bf16[4096,4096]{1,0:T(8,128)(2,1)}"):
    config = f'{{"custom_call_config":{{"body":"{body}"}}}}'
    return hlo_programs.kernel("mine", *operands, results=result, config=config)


MATRIX = "bf16[4096,4096]{1,0:T(8,128)(2,1)}"


def test_the_body_counts_once_per_step_of_the_grid():
    found = kernel_bodies.read(f'"body":"{_matmul(512, 1024, 1024)}"')
    assert found.num_steps == 8 * 4 * 4
    assert found.products == (Product(512, 1024, 1024, ("bf16", "bf16")),)
    assert found.flops == 2 * 4096**3
    module, kernel = _compiled(_matmul(512, 1024, 1024), MATRIX, MATRIX)
    # A row of blocks of the right side per row of blocks of the result, and so on.
    in_bytes = 2 * 4096 * 4096 * (4096 / 1024 + 4096 / 512)
    assert hbm_traffic.num_bytes(module, kernel) == in_bytes + 2 * 4096 * 4096
    assert kernels.flops(module, kernel) == found.flops


@pytest.mark.parametrize(
    # The times that docs.jax.dev/en/latest/pallas/tpu/matmul.html prints for v5e, whose smallest
    # call takes 0.1 ms.
    ("blocks", "seconds"),
    [((128, 128, 128), 11.77e-3), ((512, 1024, 1024), 0.889e-3)],
)
def test_small_blocks_take_the_time_of_their_grid(blocks, seconds):
    price = instruction_time.Rates.of(V5E).price(*_compiled(_matmul(*blocks), MATRIX, MATRIX))
    assert price.seconds == pytest.approx(seconds - 0.1e-3, rel=0.1)
    assert price.guess == ""


@pytest.mark.parametrize(
    ("blocks", "cause"),
    [((128, 128, 128), error_bar.BLOCKS), ((512, 1024, 1024), error_bar.KERNELS)],
)
def test_waits_for_blocks_have_a_spread_of_their_own(blocks, cause):
    module, kernel = _compiled(_matmul(*blocks), MATRIX, MATRIX)
    rates = instruction_time.Rates.of(V5E)
    event = timeline.Event(kernel, 1, price=rates.price(module, kernel))
    assert error_bar._cause_of_compute(module, rates, event) == cause


def test_narrow_products_fill_a_part_of_a_wide_matrix_unit():
    body = kernel_bodies.read(f'"body":"{_matmul(128, 128, 128)}"')
    assert [body.share_of_unit(width) for width in (128, 256)] == [1, 0.25]


def test_a_loop_in_a_kernel_counts_each_of_its_iterations():
    def kernel(x, y):
        def multiply(_, total):
            return jax.lax.fori_loop(0, 4, lambda _, z: jnp.dot(z, z), total)

        y[...] = jax.lax.fori_loop(2, 5, multiply, x[...])

    shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    found = kernel_bodies.read(f'"body":"{_body(pl.pallas_call(kernel, out_shape=shape), shape)}"')
    assert found.flops == 3 * 4 * 2 * 128**3


def test_a_loop_of_unknown_length_in_a_kernel_is_guessed():
    def kernel(length, x, y):
        y[...] = jax.lax.fori_loop(0, length[0], lambda _, z: jnp.dot(z, z), x[...])

    shape, length = jax.ShapeDtypeStruct((128, 128), jnp.float32), jnp.zeros(1, jnp.int32)
    spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(1,))
    body = _body(pl.pallas_call(kernel, out_shape=shape, grid_spec=spec), length, shape)
    compiled = _compiled(body, "s32[1]{0:T(128)}", "f32[128,128]{1,0}", result="f32[128,128]{1,0}")
    # Until jax 0.10 the program has a second loop, for the rest of an unrolled one.
    assert kernels.flops(*compiled) / (2 * 128**3) in (1, 2)
    price = instruction_time.Rates.of(V5E).price(*compiled)
    assert price.guess == "custom kernel, one iteration of its loops"


def test_two_cores_share_the_steps_of_a_parallel_axis():
    def price(semantics):
        def kernel(x, y):
            y[...] = jnp.dot(x[...], x[...], preferred_element_type=jnp.float32).astype(y.dtype)

        call = pl.pallas_call(
            kernel,
            out_shape=SQUARE,
            grid=(8, 8),
            in_specs=[pl.BlockSpec((512, 512), lambda i, j: (i, j))],
            out_specs=pl.BlockSpec((512, 512), lambda i, j: (i, j)),
            compiler_params=pltpu.CompilerParams(dimension_semantics=(semantics, "arbitrary")),
        )
        compiled = _compiled(_body(call, SQUARE), MATRIX)
        return [instruction_time.Rates.of(chip).price(*compiled).seconds for chip in (V5E, V5P)]

    on_v5e, on_v5p = price("parallel")
    assert price("arbitrary") == pytest.approx([on_v5e, 2 * on_v5p])


@pytest.mark.parametrize(
    # Cycles of the machine programs of libtpu 0.0.50: of the steps that compute and the others.
    ("chip", "block", "computing_step", "other_step"),
    [(V6E, 512, 1177, 267), (V5E, 1024, 4777, 207)],
)
def test_splash_attention_takes_about_the_time_of_its_machine_program(
    chip, block, computing_step, other_step
):
    length, heads, blocks = 8192, 32, 8192 // block
    computing = blocks * (blocks + 1) // 2
    sizes = splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=512)
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    call = splash.make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, save_residuals=True
    )
    shape = jax.ShapeDtypeStruct((heads, length, 128), jnp.bfloat16)
    table, array = f"s8[1,{blocks},{blocks}]{{2,1,0}}", "bf16[32,8192,128]{2,1,0:T(8,128)(2,1)}"
    operands = (table, table, array, array, array, "s32[8192,128]{1,0}")
    config = f'{{"custom_call_config":{{"body":"{_body(call, shape, shape, shape)}"}}}}'
    compiled = hlo_programs.kernel("splash_mha_fwd", *operands, results=array, config=config)
    price = instruction_time.Rates.of(chip).price(*compiled)
    cycles = computing * computing_step + (blocks**2 - computing) * other_step
    low, high = (factor * price.seconds for factor in error_bar.RANGES[error_bar.KERNELS])
    assert low < heads * cycles / chip.cycles_per_s < high
    assert not price.waits_for_blocks


@pytest.mark.parametrize(("rows", "num_reads"), [(2048, 128), (512, 128), (32, 8)])
def test_blocks_of_prefetched_places_are_copied_once_per_step_or_pass(rows, num_reads):
    """Grouped products read the weights of an expert once for all of its rows."""

    def kernel(places, x, y):
        y[...] = jnp.tanh(x[...])

    def copy(places, x):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(2, 64),
            in_specs=[pl.BlockSpec((8, 512), lambda i, j, places: (places[j], 0))],
            out_specs=pl.BlockSpec((8, 512), lambda i, j, places: (i, 0)),
        )
        out = jax.ShapeDtypeStruct((16, 512), jnp.float32)
        return pl.pallas_call(kernel, out_shape=out, grid_spec=spec)(places, x)

    shapes = jax.ShapeDtypeStruct((64,), jnp.int32), jax.ShapeDtypeStruct((rows, 512), jnp.float32)
    body = _body(copy, *shapes)
    found = kernel_bodies.read(f'"body":"{body}"')
    assert (found.num_steps, found.num_prefetched, found.vector_ops) == (128, 1, 8 * 512)
    assert [block.num_copies for block in found.blocks] == [128, 2]
    tables = [f"f32[{n},512]{{1,0:T(8,128)}}" for n in (rows, 16)]
    module, copied = _compiled(body, "s32[64]{0:T(128)}", tables[0], result=tables[1])
    assert hbm_traffic.num_bytes(module, copied) == (num_reads + 2) * 8 * 512 * 4


def test_a_kernel_of_another_version_is_guessed_by_its_bytes():
    module, kernel = _compiled("TUzvUgBAD=", MATRIX)
    assert kernels.body(kernel) is None
    price = instruction_time.Rates.of(V5E).price(module, kernel)
    assert price.hbm_bytes == 2 * 2 * 4096**2
    assert price.guess
