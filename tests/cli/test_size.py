"""`tpudist size`: the largest batch, the smallest slice, the cheapest run."""

import dataclasses
import json
from pathlib import Path

import pytest

import plans
from tpudist import cli, planner
from tpudist.planner.layouts.size_questions import Choice, Sizer, Sizing, pareto_front
from tpudist.planner.roofline.step_estimate import StepEstimate
from tpudist.xla.hardware import slices

RUN = "--tokens 1e9 --days 1"
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
        ("largest-batch --topologies v5e", "largest-batch is for one slice"),
        ("cheapest --topologies v5e-8 --tokens 0 --days 1", "--tokens is 0"),
        ("cheapest --topologies v5e-8 --tokens 9 --days -1", "--days is -1"),
        ("largest-batch --topologies v5e-8 --prices v5e", "--prices 'v5e' is not"),
        ("cheapest --topologies v5e-4", "which needs both: --tokens 1e11 --days 30"),
        ("smallest-slice --topologies v5e-4 --days 3", "belong to cheapest"),
        ("smallest-slice --topologies v9", "'v9' is not a generation of TPUs"),
        ("smallest-slice --topologies v5e-4 --chart x.png", "--chart draws the"),
        (f"cheapest --topologies v5e-4 --prices v5p=4 {RUN}", "--prices has no price of v5e"),
        ("smallest-slice --topologies v5e-4 --prices v5e=4", "--prices is for"),
        ("smallest-slice --topologies v5e-4 --rows 8", "only for your own step"),
        (f"cheapest --topologies v5e-4 {RUN} --tokens-per-row 1", "only for your own"),
        ("largest-batch m:step --topologies v5e-4 --rows 8", "--rows 8: largest"),
        (
            "largest-batch --topologies v5e-4 --batch-per-chip 8",
            "--batch-per-chip 8: largest-batch chooses the batch",
        ),
        (
            "largest-batch m:step --topologies v5e-4 --num-layers 2",
            "passed with your own step m:step",
        ),
        ("smallest-slice m:step --topologies v5e-4", "pass --rows"),
    ],
)
def test_mistakes_are_explained(capsys, options, message):
    code, printed = size(capsys, *options.split())
    assert code == 2
    assert message in " ".join(printed.err.split())


STEPS = """
import jax
import jax.numpy as jnp

def fails(candidate):
    raise KeyError("weights")

def without_candidate():
    return jnp.sum, (jax.ShapeDtypeStruct((8, 4), jnp.float32),)

def ignores(candidate):
    return None, jnp.sum, (jax.ShapeDtypeStruct((64, 4), jnp.float32),)

def follows(candidate):
    return None, jnp.sum, (jax.ShapeDtypeStruct((candidate.batch, 4), jnp.float32),)
"""


@pytest.mark.libtpu
@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("fails", 2, "The first error: KeyError: 'weights' ("),
        ("without_candidate", 2, "does not receive a candidate, so its batch and its layout"),
        ("ignores", 2, "own_step:ignores ignores candidate.batch"),
        ("follows", 0, "The smallest slice is v5e-4, by an estimate"),
    ],
)
def test_your_own_step_must_follow_the_batch_of_its_candidate(
    capsys, tmp_path, monkeypatch, name, code, message
):
    (tmp_path / "own_step.py").write_text(STEPS)
    monkeypatch.syspath_prepend(tmp_path)
    options = ("--topologies", "v5e-4", "--rows", "4096", "--compiles", "0")
    found, printed = size(capsys, "smallest-slice", f"own_step:{name}", *options)
    assert found == code
    assert message in " ".join((printed.out + printed.err).split())


def choice(topology, step_s=1.0, *, batch=8, share_of_memory=0.5):
    estimate = StepEstimate(step_s, share_of_memory * 2**30, 2**30, step_s, 0.0, 0.0, 0.0)
    candidate = planner.Candidate(topology, {}, "none", 1, (), batch)
    return Choice(candidate, slices.parse(topology).num_chips, 1024, estimate)


def test_the_cheapest_run_is_compiled_until_no_estimate_is_cheaper(capsys, monkeypatch):
    """Otherwise a choice with an estimate far below its plan would be the answer."""
    seconds = {"v5e-4": (3.0, 3.0), "v5e-8": (1.0, 9.0), "v5e-16": (9.0, 9.0)}

    def compile_(self, estimated):
        # The time of the plan, as an estimate: `plan` has no other figure that matters here.
        return choice(estimated.candidate.topology, seconds[estimated.candidate.topology][1])

    monkeypatch.setattr(Sizer, "_estimate", lambda self, x, batch: [choice(x, seconds[x][0])])
    monkeypatch.setattr(Sizer, "_compile", compile_)
    for compiles, topology, num_compiled, num_cheaper in ((3, "v5e-4", 2, 0), (1, "v5e-8", 1, 1)):
        sizer = Sizer(lambda candidate: (), 1, max_compiles=compiles)
        found = sizer.cheapest(dict.fromkeys(seconds, 8), 1e6, 30, {})
        assert found.answer.candidate.topology == topology
        assert (len(found.compiled), found.num_cheaper) == (num_compiled, num_cheaper)
    options = ("--topologies", *seconds, "--tokens", "1e6", "--days", "30", "--compiles", "1")
    _, printed = size(capsys, "cheapest", *options)
    assert "Not compiled: 1 choice with a cheaper estimate." in " ".join(printed.out.split())


def test_choices_that_were_not_compiled_are_not_said_to_need_too_much_memory(capsys, monkeypatch):
    large, small = (choice("v5e-4", batch=batch) for batch in (16, 8))
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
        assert "~1.00 s" in printed.out
        assert "210.40 GiB" in printed.out  # by the compiler


def test_the_front_has_the_choices_that_no_other_beats_in_time_and_cost():
    slow, fast, beaten = choice("v5e-4", 8.0), choice("v5e-16", 2.5), choice("v5p-8", 9.0)
    assert pareto_front([slow, beaten, fast], 1e6, {}) == [fast, slow]
    assert pareto_front([slow, beaten, fast], 1e6, {"v5e": 2.0, "v5p": 0.5}) == [fast, slow, beaten]


def test_the_largest_batch_that_is_estimated_to_fit_is_compiled_first(capsys, monkeypatch):
    def estimate(self, topology, batch):
        return [choice(topology, batch=batch, share_of_memory=batch / 100)]

    monkeypatch.setattr(Sizer, "_estimate", estimate)
    found = Sizer(lambda candidate: (), 1, max_compiles=0).largest_batch("v5e-8")
    assert found.answer.candidate.batch == 96
    assert not found.compiled
    assert found.num_estimated == 15  # 1, 2, 3, 4, 6, ..., 192
    assert found.next_batch == 128
    _, printed = size(capsys, "largest-batch", "--topologies", "v5e-8", "--compiles", "0")
    text = " ".join(printed.out.split())
    assert "The largest of the batches that were tried, two per doubling, is 96 rows" in text
    assert "The next, 128 rows, did not fit. The batches between the two were not tried." in text


def test_a_batch_that_never_fills_the_memory_is_not_called_the_largest(capsys, monkeypatch):
    monkeypatch.setattr(Sizer, "_estimate", lambda self, x, batch: [choice(x, batch=batch)])
    code, printed = size(capsys, "largest-batch", "--topologies", "v5e-8", "--compiles", "0")
    assert code == 0
    assert "is 786432 rows" in printed.out
    assert "No batch filled the memory" in " ".join(printed.out.split())
