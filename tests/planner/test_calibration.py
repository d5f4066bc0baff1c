"""Measured rates replace published rates, and invalid reports raise an error."""

import json

import jax.numpy as jnp
import pytest

import tpudist
from tpudist.planner.calibration import Calibration, read_calibration
from tpudist.xla.estimate.instruction_time import Rates
from tpudist.xla.hardware.chips import CHIPS


def test_plans_use_measured_rates():
    chip = CHIPS["tpu7x"]  # two devices
    measured = Calibration("tpu7x", 400e12, 2e12, 10e9, 0.5)
    calibrated = measured.apply(chip)
    before, after = Rates.of(chip), Rates.of(calibrated)
    assert after.flops_per_s() == pytest.approx(400e12)
    assert after.hbm_bytes_per_s == pytest.approx(2e12)
    assert after.matmul_cycles_per_s / before.matmul_cycles_per_s == pytest.approx(
        after.flops_per_s() / before.flops_per_s()
    )
    assert calibrated.host_bytes_per_s == pytest.approx(20e9)
    assert calibrated.ici_bytes_per_s == pytest.approx(chip.ici_bytes_per_s / 2)
    assert Calibration("tpu7x").apply(chip) == chip


def test_a_calibration_of_a_different_generation_is_rejected():
    with pytest.raises(ValueError, match="measured on v5e, but the plan is for v5p"):
        Calibration("v5e").apply(CHIPS["v5p"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"generation": "v99"}, "for 'v99', but plans support only v2, "),
        ({"generation": "v5e", "matmul_flops_per_s": 300e12}, "the published peak is 1.97e"),
        ({"generation": "v5e", "hbm_bytes_per_s": 0.0}, "hbm_bytes_per_s=0"),
        ({"generation": "v5e", "ici_ratio": float("nan")}, "ici_ratio=nan"),
    ],
)
def test_impossible_rates_are_rejected(fields, message):
    with pytest.raises(ValueError, match=message):
        Calibration(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a report of tpudist doctor --accelerator"),
        ("[]", "is not a report"),
        ('{"calibration": {"speed": 1}}', "is not a report"),
        ('{"calibration": null, "devices": {"kind": "NVIDIA H100"}}', "measured on NVIDIA H100, "),
    ],
)
def test_files_that_are_not_reports_are_rejected(text, message, tmp_path):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_calibration(tmp_path / "report.json")


def test_a_report_is_read_from_its_path_or_its_content(tmp_path):
    content = {"calibration": {"generation": "v5e", "ici_ratio": 0.8}}
    (tmp_path / "report.json").write_text(json.dumps(content))
    assert read_calibration(tmp_path / "report.json") == read_calibration(content)
    assert read_calibration(str(tmp_path / "report.json")).ici_ratio == 0.8
    with pytest.raises(FileNotFoundError):
        read_calibration(tmp_path / "none.json")


def test_a_calibration_for_devices_without_time_estimates_is_rejected(emulated_devices):
    strategy = tpudist.MirroredStrategy(emulated_devices[:2])
    with pytest.raises(ValueError, match="plans estimate times only for TPUs. Omit it, or pass"):
        strategy.plan(lambda x: x + 1, (jnp.ones(2),), calibration=Calibration("v5e"))
