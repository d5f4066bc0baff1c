"""Tests how convolutions fill the matrix unit, by the shapes of kernels and results."""

import math

import pytest

import hlo_programs
from tpudist.xla.estimate import convolutions


@pytest.mark.parametrize(
    ("kernel", "result", "labels", "share", "cycles", "is_few"),
    [
        # Rows of a window of 3 x 3 over 16 features, and positions of one over 128.
        ("bf16[3,3,16,64]{3,2,1,0}", "8,28,28,64", "b01f_01io->b01f", 48 / 128 / 2, 0, False),
        ("bf16[64,128,3,3]{0,1,3,2}", "8,28,28,64", "b01f_oi01->b01f", 1 / 2, 0, False),
        # The input features are the minor dim of the kernel.
        ("bf16[33,16,1]{1,2,0}", "8,512,1", "b0f_0io->b0f", 16 / 128 / 128, 0, False),
        # The machine programs take 17,000, 7,700 and 112,000 cycles.
        ("bf16[1,1,33]{1,0,2}", "8,264,1", "fb0_oi0->b0f", 1 / 128 / 128, 0, True),
        ("bf16[9,1,1]{2,1,0}", "8,2048,1", "b0f_0io->b0f", 9 / 128 / 128, 2048 * 9 / 12, True),
        ("pred[1,256,256]{1,0,2}", "1,256,256", "b0f_io0->b0f", 1, 2 * 256 * 256, True),
        # The gradient of a kernel for few images.
        ("bf16[64,64,4,64]{3,2,1,0}", "16,3,3,64", "f01b_01io->b01f", 64 * 4 / 256 / 2, 0, False),
    ],
)
def test_a_convolution_fills_a_part_of_the_matrix_unit(
    kernel, result, labels, share, cycles, is_few
):
    image = ",".join("8" for _ in result.split(","))
    module = hlo_programs.program(
        f"%a = bf16[{image}] parameter(0)",
        f"%b = {kernel} parameter(1)",
        f"%c = bf16[{result}] convolution(%a, %b), dim_labels={labels}, "
        'metadata={op_name="jit(f)/conv_general_dilated"}',
    )
    use = convolutions.use_of_unit(module, hlo_programs.last(module), 128)
    assert math.isclose(use.share, share)
    assert use.cycles == pytest.approx(cycles)
    assert (use.replaces_cycles, bool(use.guess)) == (is_few, is_few)


@pytest.mark.parametrize(
    ("image", "kernel", "bundles"),  # machine programs for v5e (libtpu 0.0.50)
    [
        ("80,80,32,128", "3,3,32,32", 187_340),
        ("80,80,32,128", "3,3,64,32", 357_728),
        ("80,80,32,128", "3,3,3,32", 62_550),
        ("112,112,64,128", "7,7,3,64", 562_324),
        ("112,112,64,128", "4,4,12,64", 440_496),
    ],
)
def test_images_in_lanes_fill_the_matrix_unit(image, kernel, bundles):
    dims, window = ([int(size) for size in text.split(",")] for text in (image, kernel))
    few = f"bf16[{image}]{{3,2,1,0:T(8,128)(2,1)}}"
    module = hlo_programs.program(
        f"%a = {few} parameter(0)",
        f"%b = bf16[{kernel}] parameter(1)",
        f"%c = {few} convolution(%a, %b), dim_labels=01fb_01io->01fb, "
        'metadata={op_name="jit(f)/conv_general_dilated"}',
    )
    use = convolutions.use_of_unit(module, hlo_programs.last(module), 128)
    products = math.prod(dims[:2]) * dims[3] * math.prod(window)
    assert products / (4 * 128 * 128) / use.share == pytest.approx(bundles, rel=0.18)
    assert (use.replaces_cycles, use.guess) == (window[2] < 8, "")


def test_a_product_that_adds_up_few_numbers_fills_a_part_of_the_matrix_unit():
    module = hlo_programs.program(
        "%a = bf16[8,8] parameter(0)",
        "%b = bf16[8,8] parameter(1)",
        "%c = bf16[8,8] convolution(%a, %b), dim_labels=bf_io->bf, "
        'metadata={op_name="jit(f)/dot_general"}',
    )
    assert convolutions.use_of_unit(module, hlo_programs.last(module), 128) == convolutions.UnitUse(
        8 / 128
    )
