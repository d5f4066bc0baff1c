"""`tpudist doctor --accelerator`: a crash fails only one item, and the report has the others."""

import functools
import json
import time

import jax
import jax.numpy as jnp
import pytest

import tpudist
from tpudist import cli
from tpudist.cli.accelerator import (
    accelerator_check,
    accelerator_report,
    item,
    numeric_checks,
    section_program,
    section_run,
)
from tpudist.planner import read_calibration

# A child without JAX. It prints like a section whose second item ends the process.
PROGRAM = """
import json, os, sys, time
def tell(**what): print({mark!r} + json.dumps(what), flush=True)
skipped = json.loads(sys.argv[3])
tell(devices={{"kind": "odd", "count": 1, "chip": None}})
names = [x for x in ("first", "second", "third") if x not in skipped]
tell(items=names)
{start}
for name in names:
    tell(begin=name)
    if name == "second":
        {fault}
    tell(end=name, status="ok", seconds=0.0, figures={{"seconds": 1.0}})
"""


def run_with(monkeypatch, fault, budget_s=20.0, start=""):
    program = PROGRAM.format(mark=section_program.MARK, fault=fault, start=start)
    monkeypatch.setattr(section_program, "START", program)
    begun = []
    return section_run.run_section("compute", budget_s, {}, begun.append, 10.0), begun


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("os.abort()", "failed: its process ended with -6"),
        ("raise OSError('no chip')", "failed: its process ended with 1: OSError: no chip"),
    ],
)
def test_an_item_that_crashes_its_process_fails_only_itself(monkeypatch, fault, status):
    result, begun = run_with(monkeypatch, fault)
    found = {x["name"]: x["status"] for x in result.items}
    assert found == {"first": "ok", "second": status, "third": "ok"}
    assert begun == ["first", "second", "third"]
    assert result.problem == ""
    assert not result.is_ok


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_hang_ends_when_the_time_of_the_section_is_over(monkeypatch):
    started = time.monotonic()
    result, _ = run_with(monkeypatch, "time.sleep(600)", budget_s=1.0)
    assert time.monotonic() - started < 60
    found = {x["name"]: x["status"] for x in result.items}
    assert found == {"first": "ok", "second": "failed: its process did not end in time"}
    assert result.problem == "stopped after 2 of 3 items: no time left; use --minutes 20"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("start", "fault", "budget_s"),
    [
        # The second child has no time left before it starts an item.
        ("if skipped: print('Timeout (', flush=True); os._exit(1)", "os.abort()", 20.0),
        # The first child omits the last items.
        ("names = ['first', 'second']", "tell(end='third', status='left out: no time left',"
         " seconds=0.0, figures={})", 200.0),
    ],
)  # fmt: skip
def test_a_section_out_of_time_reports_how_many_items_ran(monkeypatch, start, fault, budget_s):
    result, _ = run_with(monkeypatch, fault, budget_s, start)
    assert result.problem == "stopped after 2 of 3 items: no time left; use --minutes 20"
    assert not result.is_ok


@pytest.mark.multiprocess
def test_devices_that_do_not_start_are_reported(monkeypatch):
    monkeypatch.setattr(section_program, "START", "raise RuntimeError('Error: no device')")
    result = section_run.run_section("compute", 20.0, {}, lambda name: None, 10.0)
    assert result.items == []
    assert "failed before its first item: ended with 1: RuntimeError: Error: no device" in (
        result.problem
    )


def section(name, *items, problem="", chip="v5e"):
    devices = {"kind": "TPU v5 lite", "count": 4, "chip": chip}
    return {"name": name, "items": list(items), "devices": devices, "problem": problem}


def measured(name, status="ok", **figures):
    return {"name": name, "status": status, "seconds": 0.1, "figures": figures}


SECTIONS = [
    section(
        "compute",
        measured("matmul", seconds=2e-3, estimated_s=1e-3, dtype="bfloat16", tflop_per_s=150.0),
        measured("matmul f32", seconds=2e-3, estimated_s=None, dtype="float32", tflop_per_s=40.0),
        measured("memory 4 MiB", seconds=1e-3, estimated_s=None, gbyte_per_s=2000.0),
        measured("memory 256 MiB", seconds=1e-3, estimated_s=None, gbyte_per_s=700.0),
    ),
    section(
        "collectives",
        measured("small", seconds=1.0, estimated_s=0.1, num_bytes=4096, gbyte_per_s=0.1),
        measured("large", seconds=2.0, estimated_s=1.0, num_bytes=2**26, gbyte_per_s=9.0),
    ),
]


def test_the_report_compares_measurements_with_plans_and_contains_a_calibration():
    report = accelerator_report.build_report(SECTIONS, {"jax": "1"}, "now")
    assert report["ok"]
    assert [(x["name"], x["ratio"]) for x in report["planner"]] == [
        ("matmul", 0.5), ("small", 0.1), ("large", 0.5)
    ]  # fmt: skip
    calibration = read_calibration(report)
    assert calibration.generation == "v5e"
    assert calibration.matmul_flops_per_s == 150e12
    assert calibration.hbm_bytes_per_s == 700e9  # the largest copy, which fits no cache
    assert calibration.ici_ratio == 0.5
    assert calibration.host_bytes_per_s is None
    text = accelerator_report.format_report(report)
    assert "4 x TPU v5 lite" in text
    assert "planner: estimated over measured time of 3 programs, median 0.50" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(("home", "shown"), [("/home/someone", "~"), ("/", "/home/someone")])
def test_failures_are_listed_without_paths_of_the_home_directory(monkeypatch, home, shown):
    monkeypatch.setenv("HOME", home)
    bad = measured("sums", status="failed: ValueError: in /home/someone/x.py", seconds=1.0)
    report = accelerator_report.build_report(
        [section("numbers", bad, problem="its time is over", chip=None)], {}, "now"
    )
    assert not report["ok"]
    assert report["calibration"] is None
    text = accelerator_report.format_report(report)
    failure = f"- sums: failed: ValueError: in {shown}/x.py"
    assert f"2 problem(s):\n- numbers: its time is over\n{failure}" in text


@pytest.mark.slow
def test_wrong_results_are_failures(emulated_devices):
    def make_wrong(strategy):
        def step(x):
            context = tpudist.get_replica_context()
            return context.all_reduce("sum", x.mean())  # wrong: a sum of means

        return step, (numeric_checks._rows(strategy)["x"],)

    strategy = functools.partial(tpudist.MirroredStrategy, emulated_devices[:2])
    checks = {
        "wrong": functools.partial(numeric_checks._verify, strategy, make_wrong),
        "right": functools.partial(numeric_checks._verify, strategy, numeric_checks._make_sums),
        "not finite": lambda: {"seconds": float("nan")},
        "raises": lambda: 1 // 0,
    }
    found = {name: section_program._run(item.Item(name, run))[0] for name, run in checks.items()}
    assert found == {
        "wrong": "failed: wrong numbers",
        "right": "ok",
        "not finite": "failed: wrong numbers",
        "raises": "failed: ZeroDivisionError: integer division or modulo by zero",
    }


def test_seconds_per_call_is_an_average():
    assert 0.001 < item.seconds_per_call(lambda: time.sleep(0.001), 0.01) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("section", ["compute", "collectives", "host"])
def test_each_item_returns_a_measurement(section, emulated_devices, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    items = section_program.SECTIONS[section](emulated_devices[:2], True)
    assert items
    for one in items:
        status, figures = section_program._run(one)
        assert status == "ok", figures
        assert figures.get("seconds", figures.get("save_s")) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_command_writes_its_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accelerator_check, "SHARES", {"numbers": 1.0})
    code = cli.main(["doctor", "--accelerator", "--emulate", "2", "--output", "a.json", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report == json.loads((tmp_path / "a.json").read_text())
    assert "numbers: 12 of 12 ok" in (tmp_path / "a.txt").read_text()
    assert report["devices"]["count"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--accelerator --minutes 0", "--minutes 0.0: it must be at least 0.1"),
        (
            "--accelerator --report",
            "--report has no effect on --accelerator. Omit it, or omit --acc",
        ),
        ("--accelerator --timeout-s 9", "--timeout-s has no effect on --accelerator"),
        ("--accelerator --output /no/such/folder/a.json", "The report cannot be written"),
        ("--minutes 5", "--minutes has no effect on this check. Omit it, or add --accelerator."),
        ("--output x.json", "--output has no effect on this check"),
        ("--report --json", "--json has no effect on this check. Omit it, or omit --report."),
    ],
)
def test_wrong_options_are_reported(options, message, capsys):
    assert cli.main(["doctor", *options.split()]) == cli.WRONG_USE
    assert message in capsys.readouterr().err


def test_collectives_have_the_shape_of_their_argument_and_the_right_values(emulated_devices):
    from tpudist.cli.accelerator import device_rates

    strategy = tpudist.MirroredStrategy(emulated_devices[:2])
    x = jnp.arange(8.0)
    for kind in device_rates.COLLECTIVES:
        body = device_rates._collective(kind, 2)
        found = strategy.run(lambda x, body=body: body(x) + 0 * jax.lax.axis_index("replica"), (x,))
        first, _ = strategy.experimental_local_results(found)
        expected = {"all-to-all": [0, 1, 2, 3] * 2, "reduce-scatter": [0, 1, 2, 3] * 2}
        assert [float(v) for v in first] == expected.get(kind, list(range(8)))
