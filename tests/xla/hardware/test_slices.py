import math

import pytest
from hypothesis import given, strategies as st

from tpudist.xla.hardware import slices
from tpudist.xla.hardware.chips import CHIPS


@pytest.mark.parametrize(
    ("name", "raw", "num_slices", "num_chips", "num_devices"),
    [
        ("v5e-1", "v5e:1x1", 1, 1, 1),
        ("v5e-8", "v5e:2x4", 1, 8, 8),
        ("v5litepod-16", "v5e:4x4", 1, 16, 16),
        ("v5e-256", "v5e:16x16", 1, 256, 256),
        ("v6e-8", "v6e:2x4", 1, 8, 8),
        ("v4-64", "v4:2x4x4", 1, 32, 32),
        ("v5p-128", "v5p:4x4x4", 1, 64, 64),
        ("tpu7x-16", "tpu7x:2x2x2", 1, 8, 16),
        ("v3-32", "v3:4x4", 1, 16, 32),
        ("2xv5e-256", "v5e:16x16", 2, 512, 512),
        ("v5e:4x2", "v5e:4x2", 1, 8, 8),
        ("3xv6e:4x4", "v6e:4x4", 3, 48, 48),
        ("V5E-8", "v5e:2x4", 1, 8, 8),
    ],
)
def test_a_name_determines_the_shape_and_the_number_of_slices(
    name, raw, num_slices, num_chips, num_devices
):
    found = slices.parse(name)
    assert (found.libtpu_name, found.num_slices) == (raw, num_slices)
    assert (found.num_chips, found.num_devices) == (num_chips, num_devices)
    assert found.name == name
    assert found.chip is CHIPS[found.generation]


@pytest.mark.parametrize(
    ("number", "shape"),
    # From AI-Hypercomputer/maxtext, accelerator_to_spec_map.py ("v5p-<number>").
    [
        (8, "2x2x1"),
        (16, "2x2x2"),
        (32, "2x2x4"),
        (256, "4x4x8"),
        (384, "4x4x12"),
        (512, "4x8x8"),
        (768, "4x8x12"),
        (1024, "8x8x8"),
        (1152, "4x12x12"),
        (1536, "8x8x12"),
        (2048, "8x8x16"),
        (2304, "8x12x12"),
        (3456, "12x12x12"),
        (4096, "8x16x16"),
        (6144, "12x16x16"),
        (8704, "8x8x68"),
        (8960, "8x20x28"),
        (10368, "12x12x36"),
        (12288, "16x16x24"),
        (13824, "12x24x24"),
        (17920, "16x20x28"),
    ],
)
def test_the_default_shape_of_whole_cubes_matches_google_cloud(number, shape):
    assert "x".join(map(str, slices.default_shape(number // 2, 3))) == shape


@given(st.integers(1, 10_000), st.sampled_from([2, 3]))
def test_a_default_shape_has_the_requested_number_of_chips(num_chips, dims):
    shape = slices.default_shape(num_chips, dims)
    if shape is not None:
        assert math.prod(shape) == num_chips
        assert len(shape) == dims


@given(st.sampled_from(sorted(CHIPS)), st.integers(1, 4), st.data())
def test_the_raw_name_of_a_slice_can_be_parsed(generation, num_slices, data):
    shape = tuple(data.draw(st.integers(1, most)) for most in CHIPS[generation].largest)
    name = f"{num_slices}x{generation}:{'x'.join(map(str, shape))}"
    found = slices.parse(name)
    assert (found.generation, found.shape, found.num_slices) == (generation, shape, num_slices)
    again = slices.parse(found.libtpu_name)
    assert (again.shape, again.num_slices) == (shape, 1)


@pytest.mark.parametrize("name", ["tpu8t-8", "TPU8i-16", "8t:4x4x4", "2xv8i:2x2"])
def test_a_slice_of_an_announced_chip_is_rejected_as_not_yet_known(name):
    with pytest.raises(ValueError, match=r"slice of TPU8., .*this libtpu does not know it yet \("):
        slices.parse(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e", r"'v5e' is not a TPU slice. Did you mean .*v5e-8"),
        ("5e-256", "Did you mean v5e-256"),
        ("h100-8", r"not a TPU slice. Give a generation and its size, such as \"v5e-8\""),
        ("", "'' is not a TPU slice"),
        ("v8x:2x2x1", r"the generations and their largest slices are .*tpu7x:16x24x24"),
        (
            "v5e-7",
            r"counts chips, and Google Cloud has no such slice. The nearest are v5e-4, v5e-8",
        ),
        ("v5p-9", "counts TensorCores, 2 per chip.* The nearest are v5p-8, v5p-16"),
        ("v5p-100", "nearest are v5p-64, v5p-128"),
        ("v5e-512", 'at most 256 chips, as "v5e:16x16". For more chips, use several'),
        ("v5e:2x4x1", "not a shape of a v5e slice, which has 2 dimensions and at most 256 chips"),
        ("v5p:4x4", "which has 3 dimensions"),
        ("v5e:0x4", "not a shape"),
        ("v5e:32x32", 'such as "2xv5e:16x16"'),  # would abort the process
        ("v5e:8x32", "not a shape of a v5e slice"),
        ("0xv5e-8", "contains no slice"),
    ],
)
def test_an_invalid_slice_is_rejected_with_similar_names(name, message):
    with pytest.raises(ValueError, match=message):
        slices.parse(name)
