"""Measured rates replace published rates, and invalid reports raise an error."""

import dataclasses
import gzip
import json

import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

import tpudist
from tpudist.planner import calibration
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
        ({"generation": "v5e", "hbm_bytes_per_s": 700.0}, "a mistake, such as another unit"),
        ({"generation": "v5e", "host_bytes_per_s": 90e9}, "the published peak is 6.4e"),
        ({"generation": "v5e", "ici_ratio": 2.0}, "not possible: the published peak is 1.74"),
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
    found = read_calibration(tmp_path / "report.json")
    assert found == dataclasses.replace(
        read_calibration(content), source=str(tmp_path / "report.json")
    )
    assert read_calibration(str(tmp_path / "report.json")).ici_ratio == 0.8
    with pytest.raises(FileNotFoundError):
        read_calibration(tmp_path / "none.json")


# Traces. Names, categories, FLOPs, bytes and microseconds of operations; the peaks of a v5e are 197
# TFLOP/s and 819 GB/s.

IN_HBM = "%{} = bf16[8,128]{{1,0:T(8,128)(2,1)}} fusion(bf16[8,128]{{1,0}} %p)"
OPS = [
    (IN_HBM.format("product.1"), "convolution fusion", 15e9, 9e6, 100),  # 150 TFLOP/s
    (IN_HBM.format("product.2"), "convolution fusion", 17e9, 9e6, 100),  # 170, the best
    (IN_HBM.format("int8"), "convolution fusion", 30e9, 9e6, 100),  # above the peak of bfloat16
    (IN_HBM.format("short"), "convolution fusion", 1.9e9, 1e6, 10),  # 190, but too short
    (IN_HBM.format("copy.1"), "copy", 0, 60e6, 100),  # 600 GB/s
    (IN_HBM.format("loop"), "loop fusion", 0, 70e6, 100),  # 700, the best
    (IN_HBM.format("vmem").replace("(2,1)", "(2,1)S(1)"), "loop fusion", 0, 80e6, 100),
    (IN_HBM.format("waits"), "copy", 0, 0, 900),
]


def _xplane(ops, kind="TPU v5 Lite"):
    """Figures belong to the operation, its time to the event: so libtpu writes them."""
    names = ("device_type_string", "hlo_category", "flops", "bytes_accessed")
    text = 'planes { name: "/device:TPU:0" '
    for number, name in enumerate(names, 1):
        text += f'stat_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }} '
    text += f'stats {{ metadata_id: 1 str_value: "{kind}" }} '
    for number, (name, category, flops, num_bytes, _) in enumerate(ops, 1):
        text += (
            f'event_metadata {{ key: {number} value {{ id: {number} name: "{name}" '
            f'stats {{ metadata_id: 2 str_value: "{category}" }} '
            f"stats {{ metadata_id: 3 uint64_value: {int(flops)} }} "
            f"stats {{ metadata_id: 4 uint64_value: {int(num_bytes)} }} }} }} "
        )
    text += 'lines { name: "XLA Ops" '
    for number, op in enumerate(ops, 1):
        text += f"events {{ metadata_id: {number} duration_ps: {op[-1] * 10**6} }} " * 2
    return ProfileData.text_proto_to_serialized_xspace(text + "} }")


def _chrome_trace(ops):
    events = [
        {"ph": "M", "pid": 3, "name": "process_name", "args": {"name": "/device:TPU:0"}},
        {"ph": "M", "pid": 3, "tid": 7, "name": "thread_name", "args": {"name": "XLA Ops"}},
        {"ph": "X", "pid": 3, "tid": 8, "name": "a step", "dur": 9000, "args": {}},
    ]
    for number, (name, category, flops, num_bytes, microseconds) in enumerate(ops):
        figures = {"hlo_category": category, "model_flops": str(flops), "long_name": name}
        args = {**figures, "bytes_accessed": str(num_bytes)}
        event = {"ph": "X", "pid": 3, "tid": 7, "name": f"op.{number}", "dur": microseconds}
        events.append({**event, "args": args})
    # Without the time, so that all processes collect tests of the same names.
    return gzip.compress(json.dumps({"traceEvents": events}).encode(), mtime=0)


@pytest.mark.parametrize("ending", ["xplane.pb", "trace.json.gz"])
def test_rates_are_read_from_a_trace_of_the_profiler(ending, tmp_path):
    path = tmp_path / f"host.{ending}"
    path.write_bytes(_xplane(OPS) if ending == "xplane.pb" else _chrome_trace(OPS))
    # Only an xplane names its chip.
    found = read_calibration(path, None if ending == "xplane.pb" else "v5e")
    assert found.generation == "v5e"
    assert found.matmul_flops_per_s == pytest.approx(170e12)
    assert found.hbm_bytes_per_s == pytest.approx(700e9)
    assert (found.host_bytes_per_s, found.ici_ratio, found.source) == (None, None, str(path))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.xplane.pb", b"\x0a\xff", "is not a trace of JAX's profiler"),
        ("a.trace.json.gz", b"{", "is not a trace of JAX's profiler"),
        # The data after the header of gzip are damaged.
        (
            "a.trace.json.gz",
            _chrome_trace(OPS)[:10] + b"\xff" * 9,
            "is not a trace of JAX's profiler",
        ),
        ("a.trace.json", b'{"traceEvents": [1]}', "is not a trace of JAX's profiler"),
        ("a.xplane.pb", b"", "has no operations of a TPU"),
        ("a.trace.json.gz", _chrome_trace(OPS), "does not say which TPU"),
        ("a.xplane.pb", _xplane(OPS[2:4]), "below the peak of v5e, so it shows no rate"),
    ],
)
def test_a_trace_without_possible_rates_is_rejected(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_calibration(tmp_path / name)


def test_kept_rates_are_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    measured = Calibration("tpu7x", 900e12, 3e12, 30e9, 0.9, source="host.xplane.pb")
    path = calibration.write_user_file(measured)
    assert path == calibration.user_file("tpu7x") == tmp_path / "tpudist/calibration/tpu7x.json"
    assert read_calibration(path) == measured
    assert measured.describe() == (
        "tpu7x, from host.xplane.pb: matrix products 900 TFLOP/s (78% of the peak), memory "
        "3,000 GB/s (81% of the peak), host 30 GB/s, collectives at 0.90 of the published rate"
    )


def test_a_calibration_for_devices_without_time_estimates_is_rejected(emulated_devices):
    strategy = tpudist.MirroredStrategy(emulated_devices[:2])
    with pytest.raises(ValueError, match="plans estimate times only for TPUs. Omit it, or pass"):
        strategy.plan(lambda x: x + 1, (jnp.ones(2),), calibration=Calibration("v5e"))
