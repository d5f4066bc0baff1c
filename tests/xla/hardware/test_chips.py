import dataclasses
import math

import jax
import pytest

from tpudist.xla.hardware import chips
from tpudist.xla.hardware.announced_chips import ANNOUNCED
from tpudist.xla.hardware.chips import CHIPS

RATES = ["bf16_flops_per_s", "cycles_per_s", "hbm_bytes", "hbm_bytes_per_s", "dcn_bytes_per_s"]


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_every_figure_has_a_source(chip):
    for figure in [*RATES, "host_bytes_per_s", "hbm_efficiency"]:
        assert chip.sources[figure]
    assert chip.sources["ici_link_bytes_per_s"]
    assert set(chip.narrow_ops_per_s) <= set(chip.sources)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_the_figures_of_a_chip_are_consistent(chip):
    assert len(chip.largest) == chip.torus_dims
    assert chip.ici_links == 2 * chip.torus_dims
    assert 0.5 < chip.hbm_efficiency < 1
    # The compiler reserves some of the memory, at most a fifteenth.
    assert 14 / 15 < chip.compiler_hbm_bytes / chip.hbm_bytes < 1.01
    # A cycle does a whole number of passes of 128 x 128 or 256 x 256 multiply-adds.
    passes = chip.bf16_flops_per_s / chip.cycles_per_s / (2 * 128 * 128)
    assert passes == pytest.approx(round(passes), rel=0.01)


def test_the_bandwidths_match_the_documentation():
    """Bidirectional GB/s per chip, all links: docs.cloud.google.com/tpu/docs."""
    documented = {"v5e": 400, "v5p": 1200, "v6e": 800, "tpu7x": 1200}
    for generation, gigabytes in documented.items():
        chip = CHIPS[generation]
        usable = 2 * chip.ici_links * chip.ici_bytes_per_s
        assert usable == pytest.approx(0.9 * 1e9 * gigabytes)


def test_a_host_of_v5e_has_two_network_cards_of_100_gbit_per_s():
    """docs.cloud.google.com/tpu/docs/v5e."""
    chip = CHIPS["v5e"]
    assert 8 * chip.dcn_bytes_per_s * chip.chips_per_host == 2 * 100e9


@pytest.mark.parametrize(
    ("generation", "shape", "wraps"),
    [
        ("v5e", (4, 4), (False, False)),
        ("v5e", (8, 16), (False, True)),
        ("v6e", (16, 16), (True, True)),
        ("v4", (2, 4, 4), (False, False, False)),
        ("v5p", (4, 4, 8), (True, True, True)),
        ("tpu7x", (2, 2, 1), (False, False, False)),
    ],
)
def test_axes_of_whole_cubes_and_full_rows_are_rings(generation, shape, wraps):
    assert CHIPS[generation].ring_axes(shape) == wraps


def test_chip_of_device_finds_the_chip():
    class Device:
        device_kind = "TPU v5 lite"

    assert chips.chip_of_device(Device()) is CHIPS["v5e"]
    assert chips.chip_of_device(jax.devices()[0]) is None


def test_the_largest_slices_have_the_published_number_of_chips():
    most = {name: math.prod(chip.largest) for name, chip in CHIPS.items()}
    assert most == {
        "v2": 256,
        "v3": 1024,
        "v4": 4096,
        "v5e": 256,
        "v5p": 8960,
        "v6e": 256,
        "tpu7x": 9216,
    }


@pytest.mark.parametrize("chip", ANNOUNCED.values(), ids=ANNOUNCED)
def test_every_figure_of_an_announced_chip_has_a_source(chip):
    assert chip.generation not in CHIPS
    given = {
        field.name
        for field in dataclasses.fields(chip)
        if isinstance(getattr(chip, field.name), int | float)
    }
    assert given == set(chip.sources)
