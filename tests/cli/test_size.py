"""`tpudist size`: the largest batch, the smallest slice, the cheapest run."""

import dataclasses
import json
from pathlib import Path

import pytest

import plans
from tpudist import cli, planner
from tpudist.planner.layouts.size_questions import Choice, Sizer, Sizing, pareto_front
from tpudist.planner.roofline.step_estimate import StepEstimate

RUN = ("--tokens", "1e9", "--days", "1")
TINY = ("--remat", "none", "--compiles", "0", "--json", "-")


def size(capsys, *options):
    code = cli.main(["size", *options])
    return code, capsys.readouterr()


@pytest.mark.libtpu
@pytest.mark.slow
def test_the_smallest_slice_and_the_cheapest_run_are_found_by_estimates(capsys, tmp_path):
    code, printed = size(capsys, "smallest-slice", "--topologies", "v5e-8", "v5e-4", *TINY)
    found = json.loads(printed.out)
    assert code == 0
    assert found["answer"]["topology"] == "v5e-4"
    assert found["num_estimated"] == 6
    assert not found["answer"]["is_compiled"]

    chart = tmp_path / "front.png"
    run = ["--tokens", "1e9", "--days", "30", "--global-batch", "64", "--chart", str(chart)]
    code, printed = size(capsys, "cheapest", "--topologies", "v5e-8", "v5e-4", *run, *TINY)
    found = json.loads(printed.out)
    assert code == 0
    days = [x["days"] for x in found["choices"]]
    assert days == sorted(days)
    assert found["answer"]["chip_hours"] == min(x["chip_hours"] for x in found["choices"])
    assert Path(chart).stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["largest-batch", "--topologies", "v5e"], "largest-batch is for one slice"),
        (["cheapest", "--topologies", "v5e-8", "--tokens", "0", "--days", "1"], "--tokens is 0"),
        (["cheapest", "--topologies", "v5e-8", "--tokens", "9", "--days", "-1"], "--days is -1"),
        (["largest-batch", "--topologies", "v5e-8", "--prices", "v5e"], "--prices 'v5e' is not"),
        (["cheapest", "--topologies", "v5e-4"], "which needs both: --tokens 1e11 --days 30"),
        (["smallest-slice", "--topologies", "v5e-4", "--days", "3"], "belong to cheapest"),
        (["smallest-slice", "--topologies", "v9"], "'v9' is not a generation of TPUs"),
        (["smallest-slice", "--topologies", "v5e-4", "--chart", "x.png"], "--chart draws the"),
        (
            ["cheapest", "--topologies", "v5e-4", "--prices", "v5p=4", *RUN],
            "--prices has no price of v5e",
        ),
        (["smallest-slice", "--topologies", "v5e-4", "--prices", "v5e=4"], "--prices is for"),
        (["smallest-slice", "--topologies", "v5e-4", "--rows", "8"], "only for your own step"),
        (["cheapest", "--topologies", "v5e-4", *RUN, "--tokens-per-row", "1"], "only for your own"),
        (["largest-batch", "m:step", "--topologies", "v5e-4", "--rows", "8"], "--rows 8: largest"),
        (
            ["largest-batch", "--topologies", "v5e-4", "--batch-per-chip", "8"],
            "--batch-per-chip 8: largest-batch chooses the batch",
        ),
        (
            ["largest-batch", "m:step", "--topologies", "v5e-4", "--num-layers", "2"],
            "passed with your own step m:step",
        ),
        (["smallest-slice", "m:step", "--topologies", "v5e-4"], "pass --rows"),
    ],
)
def test_mistakes_are_explained(capsys, options, message):
    code, printed = size(capsys, *options)
    assert code == 2
    assert message in " ".join(printed.err.split())


def test_a_step_that_fails_for_each_layout_is_not_said_to_need_memory(
    capsys, tmp_path, monkeypatch
):
    (tmp_path / "step_that_fails.py").write_text("def make_step(candidate):\n    raise KeyError")
    monkeypatch.syspath_prepend(tmp_path)
    code, printed = size(
        capsys, "largest-batch", "step_that_fails:make_step", "--topologies", "v5e-8"
    )
    assert code == 2
    assert "No choice could be estimated" in printed.err


def test_choices_that_were_not_compiled_are_not_said_to_need_too_much_memory(capsys, monkeypatch):
    estimate = StepEstimate(1.0, 1.0, 2.0, 1.0, 0.0, 0.0, 0.0)
    large, small = (
        Choice(planner.Candidate("v5e-4", {}, "none", 1, (), batch), 4, batch, estimate)
        for batch in (16, 8)
    )
    refused = dataclasses.replace(large, plan=plans.refused())
    for choices, message in (
        ((large, small), "None of the compiled choices fits, but 1 other may."),
        ((large,), "Nothing that was tried fits."),
    ):
        found = Sizing(None, (refused,), choices, 4, 0.1)
        monkeypatch.setattr(Sizer, "largest_batch", lambda *_, found=found: found)
        code, printed = size(capsys, "largest-batch", "--topologies", "v5e-4")
        assert code == 1
        assert message in " ".join(printed.out.split())


def test_the_front_has_the_choices_that_no_other_beats_in_time_and_cost():
    def choice(topology, chips, step_s):
        estimate = StepEstimate(step_s, 1.0, 2.0, step_s, 0.0, 0.0, 0.0)
        return Choice(planner.Candidate(topology, {}, "none", 1), chips, 1024, estimate)

    slow, fast = choice("v5e-4", 4, 8.0), choice("v5e-16", 16, 2.5)
    beaten = choice("v5p-8", 4, 9.0)
    assert pareto_front([slow, beaten, fast], 1e6, {}) == [fast, slow]
    assert pareto_front([slow, beaten, fast], 1e6, {"v5e": 2.0, "v5p": 0.5}) == [fast, slow, beaten]


def test_the_largest_batch_that_is_estimated_to_fit_is_compiled_first(monkeypatch):
    def estimate(self, topology, batch):
        found = StepEstimate(1.0, float(batch), 100.0, 1.0, 0.0, 0.0, 0.0)
        return [Choice(planner.Candidate(topology, {}, "none", 1, (), batch), 8, batch, found)]

    monkeypatch.setattr(Sizer, "_estimate", estimate)
    found = Sizer(lambda candidate: (), 1, max_compiles=0).largest_batch("v5e-8")
    assert found.answer.candidate.batch == 96
    assert not found.compiled
    assert found.num_estimated == 15  # 1, 2, 3, 4, 6, ..., 192
    assert not found.is_limited


def test_a_batch_that_never_fills_the_memory_is_not_called_the_largest(capsys, monkeypatch):
    def estimate(self, topology, batch):
        found = StepEstimate(1.0, 1.0, 100.0, 1.0, 0.0, 0.0, 0.0)
        return [Choice(planner.Candidate(topology, {}, "none", 1, (), batch), 8, batch, found)]

    monkeypatch.setattr(Sizer, "_estimate", estimate)
    code, printed = size(capsys, "largest-batch", "--topologies", "v5e-8", "--compiles", "0")
    assert code == 0
    assert "The largest batch that was tried is 786432 rows" in printed.out
    assert "No batch filled the memory" in printed.out
