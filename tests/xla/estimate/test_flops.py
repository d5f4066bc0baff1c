import math

import jax
import jax.numpy as jnp
import pytest

import hlo_programs
from tpudist.xla.estimate import flops, kernels
from tpudist.xla.hlo import hlo_module


def _module(function, *arguments):
    return hlo_module.parse(jax.jit(function).lower(*arguments).compile().as_text())


def _f32(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


@pytest.mark.parametrize(
    ("equation", "left", "right", "count"),
    [
        ("mk,kn->mn", (4, 5), (5, 6), 4 * 5 * 6),
        ("bmk,bkn->bmn", (3, 4, 5), (3, 5, 6), 3 * 4 * 5 * 6),
        ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5), 2 * 3 * 4 * 6 * 5),
        ("mkl,kln->mn", (4, 5, 6), (5, 6, 7), 4 * 5 * 6 * 7),
    ],
)
def test_a_matrix_product_counts_two_operations_per_multiply_add(equation, left, right, count):
    module = _module(lambda a, b: jnp.einsum(equation, a, b), _f32(*left), _f32(*right))
    assert hlo_programs.step_flops(module) == 2 * count


def test_a_training_step_of_a_perceptron_has_three_products_per_layer():
    """One forward and one per gradient, except for the gradient of the first input."""
    rows, sizes = 32, (16, 64, 8)
    weights = [_f32(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]

    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x.sum()

    module = _module(jax.grad(loss), weights, _f32(rows, sizes[0]))
    first, second = (2 * rows * math.prod(weight.shape) for weight in weights)
    assert hlo_programs.step_flops(module) == 2 * first + 3 * second


def test_a_scanned_and_rematerialized_stack_multiplies_by_its_layers():
    """XLA's own `cost_analysis()` counts one layer."""
    layers, rows, width = 5, 8, 16

    def loss(weights, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jax.lax.scan(layer, x, weights)[0].sum()

    module = _module(jax.grad(loss), _f32(layers, width, width), _f32(rows, width))
    # Forward, recomputed forward, and one for each gradient.
    assert hlo_programs.step_flops(module) == layers * 4 * 2 * rows * width * width


@pytest.mark.parametrize(
    ("window", "labels", "shapes", "count"),
    [
        # [m, k] @ [k, n].
        ("", "bf_io->bf", ("4,5", "5,6", "4,6"), 4 * 5 * 6),
        ("", "bf_oi->bf", ("4,5", "6,5", "4,6"), 4 * 5 * 6),
        # 3 x 3 over 8 x 8 with padding: border positions count fewer products.
        (
            "window={size=3x3 pad=1_1x1_1}, ",
            "b01f_01io->b01f",
            ("2,8,8,4", "3,3,4,5", "2,8,8,5"),
            2 * 4 * 5 * 22**2,
        ),
        # A batched product [3, m, k] @ [3, k, n] as a TPU runs it: one batch per position.
        (
            "window={size=3 stride=2 pad=0_0 lhs_dilate=3}, ",
            "0bf_0io->0bf",
            ("3,4,5", "3,5,6", "3,4,6"),
            3 * 4 * 5 * 6,
        ),
        # Two dims of the result come only from the kernel.
        (
            "window={size=3x2x2 pad=2_2x1_1x0_0 rhs_reversal=1x1x0}, ",
            "b2f01_2i01o->b01f2",
            ("4096,2,128,1,1", "2,128,3,2,128", "4096,3,2,128,1"),
            4096 * 2 * 128 * 3 * 2 * 128,
        ),
        # Each of 4 channels separately.
        (
            "window={size=3}, feature_group_count=4, ",
            "b0f_0io->b0f",
            ("2,8,4", "3,1,4", "2,6,4"),
            2 * 6 * 4 * 3,
        ),
    ],
)
def test_a_convolution_counts_only_products_inside_the_array(window, labels, shapes, count):
    lhs, rhs, out = shapes
    module = hlo_programs.program(
        f"%a = bf16[{lhs}] parameter(0)",
        f"%b = bf16[{rhs}] parameter(1)",
        f"%c = bf16[{out}] convolution(%a, %b), {window}dim_labels={labels}",
    )
    assert hlo_programs.step_flops(module) == 2 * count
    assert flops.kinds_of_products(module, hlo_programs.last(module)) == {"bf16"}


def test_matrix_products_inside_fusions_count():
    module = hlo_programs.program(
        "%a = s8[4,5] parameter(0)",
        "%b = s8[5,6] parameter(1)",
        "%f = s32[4,6] fusion(%a, %b), kind=kOutput, calls=%inside",
        computations="""%inside (p: s8[4,5], q: s8[5,6]) -> s32[4,6] {
  %p = s8[4,5] parameter(0)
  %q = s8[5,6] parameter(1)
  ROOT %c = s32[4,6] convolution(%p, %q), dim_labels=bf_io->bf
}
""",
    )
    assert hlo_programs.step_flops(module) == 2 * 4 * 5 * 6
    assert flops.kinds_of_products(module, hlo_programs.last(module)) == {"int8"}


# Kernels.


Q, KV = "bf16[2,8,2048,128]", "bf16[2,2,2048,128]"
TABLE = "s8[1,4,4]"
PRODUCT = 2 * 2 * 8 * 2048 * 2048 * 128
GRADIENTS = f"({KV}, {KV})"


@pytest.mark.parametrize(
    ("kernel", "products"),
    [
        (hlo_programs.kernel("splash_mha_fwd_residuals", Q, Q, Q), 2),
        (hlo_programs.kernel("splash_mha_fwd_residuals", TABLE, TABLE, Q, Q, Q), 2 * 10 / 16),
        (hlo_programs.kernel("splash_mha_dkv_no_residuals", TABLE, TABLE, Q, KV, KV), 4 * 10 / 16),
        (hlo_programs.kernel("splash_mha_dq_no_residuals", TABLE, TABLE, Q, KV, KV), 3 * 10 / 16),
        (
            hlo_programs.kernel(
                "splash_mha_dkv_no_residuals",
                *(TABLE, TABLE, Q, KV, KV),
                results=f"(bf16[4,2,8,2048,128], {KV}, {KV})",
            ),
            5 * 10 / 16,
        ),
        # A window of two blocks: one block for the first row, two for every other row.
        (
            hlo_programs.kernel("splash_mqa_fwd", "s8[1,4,2]", Q, Q, Q, config='"block_kv": 512'),
            2 * 7 / 16,
        ),
        (hlo_programs.kernel("flash_mha_bwd_dq_block_q_128", Q, Q, Q), 3),
        (hlo_programs.kernel("flash_mha_bwd_dkv_block_q_128", Q, Q, Q), 4),
    ],
)
def test_attention_kernels_count_the_blocks_that_they_visit(kernel, products):
    assert kernels.is_kernel(kernel[1])
    assert kernels.flops(*kernel) == pytest.approx(products * PRODUCT)
    assert kernels.narrowest_dim(*kernel) == 128


def test_other_kernels_report_their_cost_or_have_none():
    told = hlo_programs.kernel(
        "mine", Q, config='{"cost_estimate":{"bytes_accessed":"8","flops":"4096"}}'
    )
    assert kernels.flops(*told) == 4096
    assert kernels.flops(*hlo_programs.kernel("mine", Q)) is None
    assert kernels.narrowest_dim(*told) is None
    assert not kernels.is_kernel(
        hlo_programs.last(hlo_programs.program("%p = f32[8] parameter(0)"))
    )
