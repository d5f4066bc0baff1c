"""The search over layouts of a step: its candidates, their order, and its report."""

import copy
import dataclasses
import inspect
import io
import math
import pickle
import re
import threading
import time
from html import unescape
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from hypothesis import given, strategies as st
from rich.console import Console

import plans
import tpudist
from tpudist import planner
from tpudist.planner.layouts import candidates, layout_search, search_result, search_text
from tpudist.planner.layouts.candidates import Candidate
from tpudist.planner.layouts.search_outcomes import Outcome
from tpudist.planner.layouts.search_result import SearchResult


def make_step(candidate, width=64, hidden=64):
    """Trains one layer, with microbatches and rematerialization as the candidate requests."""
    strategy = tpudist.TPUStrategy(devices=candidate.devices, replica_axes=candidate.replica_axes)
    model = strategy.create_abstract(lambda: nnx.Linear(width, hidden, rngs=nnx.Rngs(0)))
    optimizer = strategy.create_abstract(
        lambda model: tpudist.Optimizer(optax.sgd(0.1), model, reduce_op="mean"), model
    )

    def step(model, optimizer, x):
        def loss(model):
            apply = nnx.remat(lambda m, x: m(x)) if candidate.remat == "full" else lambda m, x: m(x)
            parts = x.reshape(candidate.microbatches, -1, width)
            return sum(jnp.mean(apply(model, part) ** 2) for part in parts)

        optimizer.update(model, nnx.grad(loss)(model))

    x = jax.ShapeDtypeStruct((64, width), jnp.float32)
    return strategy, step, (model, optimizer, planner.GlobalBatch(x))


def search(make_step=make_step, topology=None, **given):
    given = {"geometries": [{}, {"fsdp": 2}], "remat": ["none"], "cache": False} | given
    return planner.search(make_step, topology, **given)


# Candidates.


def _all(geometries, remat=("none", "full"), microbatches=(1, 2)):
    found = candidates.make_candidates(None, [], geometries, remat, microbatches)
    return [one.name for one in found]


def test_all_combinations_are_candidates_exactly_once():
    found = _all([{}, {"fsdp": 1}, {"fsdp": 2}])
    assert len(found) == len(set(found)) == 2 * 2 * 2


def test_the_most_promising_candidates_come_first():
    assert _all([{"tensor": 8}, {"fsdp": 8}, {}], microbatches=(2, 1)) == [
        "data parallel, remat none",
        "fsdp=8, remat none",
        "data parallel, remat none, 2 microbatches",
        "fsdp=8, remat none, 2 microbatches",
        *["data parallel, remat full", "tensor=8, remat none", "fsdp=8, remat full"],
        *["data parallel, remat full, 2 microbatches", "tensor=8, remat none, 2 microbatches"],
        "fsdp=8, remat full, 2 microbatches",
        *["tensor=8, remat full", "tensor=8, remat full, 2 microbatches"],
    ]


@given(st.integers(1, 512))
def test_the_usual_geometries_divide_the_devices(num_devices):
    found = list(candidates.usual_geometries(num_devices))
    assert {} in found
    for axes in found:
        inside = axes.get("fsdp", 1) * axes.get("tensor", 1)
        assert num_devices % inside == 0
        assert found.count(axes) == 1


def test_a_candidate_without_more_splits_or_remat_needs_at_least_as_much_memory():
    remat = ["none", "minimal", "full"]

    def one(axes, name, number=1):
        return Candidate(None, axes, name, number)

    known = one({"fsdp": 4}, "minimal", 2)
    for same_or_more in [known, one({}, "minimal", 2), one({"fsdp": 4}, "none", 1)]:
        assert candidates.needs_no_less(same_or_more, known, remat)
    for less in [one({"fsdp": 8}, "none"), one({}, "full"), one({"tensor": 2}, "none")]:
        assert not candidates.needs_no_less(less, known, remat)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"geometries": []}, "at least one geometry"),
        ({"remat": []}, "at least one geometry"),
        ({"geometries": {"fsdp": 8}}, "geometries must be a list of dicts of axes"),
        ({"remat": "full"}, "remat a list of names"),
        ({"microbatches": [0]}, "microbatches has 0. Each number must be an integer of at least 1"),
        ({"time_budget_s": 0}, "time_budget_s=0"),
        ({"time_budget_s": math.inf}, "time_budget_s=inf: it must be a number of seconds above 0"),
        ({"tokens_per_step": -1}, "tokens_per_step=-1: .* an integer above 0"),
        ({"model_flops": math.nan}, "model_flops=nan: it must be .* above 0"),
        ({"max_workers": 0}, "max_workers=0"),
        ({"topology": "v5e-7"}, "not a v5e slice"),
    ],
)
def test_a_search_without_candidates_is_rejected(given, message):
    with pytest.raises(ValueError, match=message):
        search(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens_per_step": 0}, "tokens_per_step=0: .* an integer above 0"),
        ({"tokens_per_step": -1}, "tokens_per_step=-1"),
        ({"tokens_per_step": math.nan}, "tokens_per_step=nan"),
        ({"tokens_per_step": True}, "tokens_per_step=True"),
        ({"model_flops": -5}, "model_flops=-5: it must be .* above 0"),
        ({"model_flops": math.inf}, "model_flops=inf"),
        ({"model_flops": "many"}, "model_flops='many'"),
    ],
)
def test_invalid_numbers_are_rejected_before_tracing(given, message):
    def fails(x):
        raise AssertionError("it was traced")

    with pytest.raises(ValueError, match=message):
        tpudist.MirroredStrategy().plan(fails, (jnp.ones(8),), **given)


# Outcomes.


@pytest.mark.slow
def test_every_candidate_is_planned_on_the_devices_and_reports_its_memory():
    asked = []

    def noted(candidate):
        asked.append(candidate.name)
        return make_step(candidate)

    progress = []
    result = search(noted, microbatches=[1, 2], progress=lambda *told: progress.append(told))
    assert asked == [
        "data parallel, remat none",
        "fsdp=2, remat none",
        "data parallel, remat none, 2 microbatches",
        "fsdp=2, remat none, 2 microbatches",
    ]
    assert [one.status for one in result.outcomes] == ["fits"] * 4
    assert result.num_devices == len(jax.devices()) == 8
    # Without an estimated time, the candidate with the least memory is the best.
    peaks = [one.plan.memory.peak_bytes for one in result.outcomes]
    assert peaks == sorted(peaks)
    assert result.best.plan.mesh["replica"] in (4, 8)
    assert any("2/4 fsdp=2, remat none: " in what for what, _ in progress)


def test_a_plan_reports_the_rows_of_a_replica():
    result = search(geometries=[{"fsdp": 2}, {"fsdp": 8}])
    notes = {one.candidate.geometry: one.plan.notes[0] for one in result.outcomes}
    assert notes["fsdp=2"] == "x: 64 rows in all, 16 on each of 4 replicas."
    assert notes["fsdp=8"] == "x: 64 rows on one replica."


@pytest.mark.slow
def test_two_candidates_with_the_same_program_are_compiled_once():
    result = search(lambda one: make_step(dataclasses.replace(one, remat="none")), remat=["a", "b"])
    assert [one.status for one in result.outcomes] == ["fits"] * 4
    twins = [one for one in result.outcomes if one.same_as]
    assert {(one.candidate.name, one.same_as) for one in twins} == {
        ("data parallel, remat b", "data parallel, remat a"),
        ("fsdp=2, remat b", "fsdp=2, remat a"),
    }
    for one in twins:
        assert any("was not called again" in note for note in one.plan.notes)


def test_shapes_that_do_not_fit_are_reported_with_their_line_and_the_search_continues():
    """JAX raises TypeError for them."""
    result = search(geometries=[{}], microbatches=[1, 3])
    assert [one.status for one in result.outcomes] == ["fits", "failed"]
    assert result.outcomes[1].candidate.microbatches == 3
    lines, first = inspect.getsourcelines(make_step)
    line = first + next(i for i, line in enumerate(lines) if "x.reshape(" in line)
    reason = result.outcomes[1].reason
    assert reason.startswith("TypeError: cannot reshape array")
    assert reason.endswith(f"({__file__}:{line})")


def test_an_error_in_a_replica_function_is_reported():
    def odd(candidate):
        strategy, step, args = make_step(candidate)

        def mistaken(*args):
            raise KeyError("odd one") if candidate.replica_axes else LookupError("none")

        return strategy, mistaken if candidate.geometry != "fsdp=4" else step, args

    result = search(odd, geometries=[{}, {"fsdp": 2}, {"fsdp": 4}])
    assert [one.status for one in result.outcomes] == ["fits", "failed", "failed"]
    assert "KeyError: 'odd one'" in result.outcomes[2].reason


@pytest.mark.parametrize("error", [TypeError, ValueError, RuntimeError])
def test_a_shape_error_in_make_step_is_reported(error):
    def sometimes(candidate):
        if candidate.replica_axes:
            raise error("too odd")
        return make_step(candidate)

    result = search(sometimes)
    assert [one.status for one in result.outcomes] == ["fits", "failed"]
    assert result.outcomes[1].reason.startswith(f"{error.__name__}: too odd ({__file__}:")


def test_an_exception_in_the_progress_callback_ends_a_search():
    class Enough(Exception):
        pass

    def watch(doing, seconds):
        if "lowering" in doing:
            raise Enough

    with pytest.raises(Enough):
        search(progress=watch)


def test_a_mistake_in_make_step_is_raised_to_the_caller():
    def mistaken(candidate):
        return candidate.nothing_of_the_kind

    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        search(mistaken)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        search(mistaken, max_workers=2)


def test_a_mistake_in_make_step_ends_the_other_workers():
    """One worker is busy with a candidate and does not start another."""
    raised, asked = threading.Event(), []

    def mistaken(candidate):
        asked.append(candidate.geometry)
        if candidate.geometry == "data parallel":
            assert raised.wait(30)
            time.sleep(0.3)  # until the other worker has ended
            return make_step(candidate)
        raised.set()
        raise KeyError("mistaken")

    with pytest.raises(KeyError, match="mistaken"):
        search(mistaken, geometries=[{}, {"fsdp": 2}, {"fsdp": 4}], max_workers=2)
    assert asked == ["data parallel", "fsdp=2"]


def test_a_search_inside_a_scope_raises_an_error():
    """Each candidate has its own strategy."""
    with (
        tpudist.MirroredStrategy().scope(),
        pytest.raises(RuntimeError, match="scope of .*MirroredStrategy.* Call it outside of"),
    ):
        search()


@pytest.mark.slow
def test_several_candidates_are_planned_in_parallel():
    result = search(geometries=[{}, {"fsdp": 2}, {"fsdp": 4}, {"fsdp": 8}], max_workers=2)
    assert [one.status for one in result.outcomes] == ["fits"] * 4
    alone = search(geometries=[{"fsdp": 4}])
    (same,) = [one for one in result.outcomes if one.candidate.geometry == "fsdp=4"]
    assert same.plan.program == alone.best.plan.program


def test_candidates_outside_the_time_budget_are_listed():
    result = search(time_budget_s=1e-6)
    assert [one.status for one in result.outcomes] == ["not reached"] * 2
    assert result.best is None


def test_a_candidate_interrupted_by_the_time_budget_is_listed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(layout_search, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def late(doing, seconds):
        if "fsdp=2" in doing and "lowering" in doing:
            now[0] = 1000.0

    result = search(time_budget_s=900, progress=late)
    assert [one.status for one in result.outcomes] == ["fits", "not reached"]
    assert result.outcomes[1].reason == "left while compiling"
    assert result.seconds == 1000


def test_make_step_may_return_plan_arguments():
    def counted(candidate):
        return *make_step(candidate), {"tokens_per_step": 64}

    result = search(counted, geometries=[{}])
    assert result.best.plan.tokens_per_step == 64
    result = search(counted, geometries=[{}], tokens_per_step=32)
    assert result.best.plan.tokens_per_step == 64


def test_the_number_of_workers_depends_on_available_memory():
    """The file cache counts as free: on a machine with a day of uptime, little else is."""
    with open("/proc/meminfo") as file:
        figures = dict(line.split(":") for line in file)
    available = int(figures["MemAvailable"].split()[0]) * 1024
    assert layout_search._available_bytes() == pytest.approx(available, rel=0.25)
    assert layout_search._count_workers(1) == 1


# Results.


def _outcome(geometry, remat="none", number=1, *, step_s=None, over=0, tokens=None):
    candidate = Candidate("v5e-256", geometry, remat, number)
    if step_s is None:
        plan = plans.refused()
        refusal = dataclasses.replace(plan.refusal, over_bytes=over)
        return Outcome(candidate, "too large", dataclasses.replace(plan, refusal=refusal))
    plan = plans.fitting()
    ends = {"low_s": 0.9 * step_s, "high_s": 1.15 * step_s}
    time = dataclasses.replace(plan.time, step_s=step_s, **ends)
    plan = dataclasses.replace(plan, time=time, tokens_per_step=tokens)
    return Outcome(candidate, "fits", plan)


def _result(*outcomes):
    return SearchResult("v5e-256", 256, search_result.rank(outcomes), 12.0, 900.0)


def test_the_fastest_candidate_that_fits_is_first_and_the_rest_are_ordered():
    failed = Outcome(Candidate("v5e-256", {"fsdp": 3}, "none", 1), "failed", reason="ValueError: 3")
    late = Outcome(Candidate("v5e-256", {"fsdp": 1}, "full", 1), "not reached", reason="late")
    far = _outcome({}, over=9, step_s=None)
    near = _outcome({"fsdp": 2}, over=3, step_s=None)
    slow, fast = _outcome({"fsdp": 8}, step_s=3.0), _outcome({"fsdp": 4}, step_s=2.0)
    result = _result(failed, late, far, near, slow, fast)
    assert [one.candidate.geometry for one in result.outcomes[:4]] == [
        *["fsdp=4", "fsdp=8", "fsdp=2", "data parallel"]
    ]
    assert [one.status for one in result.outcomes[4:]] == ["failed", "not reached"]
    assert result.best.candidate.geometry == "fsdp=4"


def test_plans_without_code_decide_which_candidates_are_compiled():
    large = _outcome({"fsdp": 1}, over=100)
    slow, fast = _outcome({"fsdp": 8}, step_s=3.0), _outcome({"fsdp": 4}, step_s=2.0)
    later = Outcome(Candidate("v5e-256", {"fsdp": 2}, "none", 1), "not reached")
    final, order = layout_search._split_by_plans([large, slow, later, fast])
    assert final == [large]
    assert order == [fast.candidate, slow.candidate, later.candidate]


def test_candidates_are_ranked_by_tokens_per_second_before_step_time():
    small, large = (
        _outcome({"fsdp": 4}, step_s=1.0, tokens=10),
        _outcome({"fsdp": 8}, step_s=2.0, tokens=30),
    )
    assert _result(small, large).best.candidate.geometry == "fsdp=8"


def test_the_remedy_has_the_fewest_changes_and_then_the_shortest_step():
    large = _outcome({"fsdp": 4}, over=1)
    others = [
        _outcome({"fsdp": 4}, "full", step_s=4.0),
        _outcome({"fsdp": 4}, "none", 2, step_s=3.0),
        _outcome({"fsdp": 8}, "none", 2, step_s=1.0),
    ]
    (found,) = _result(large, *others).of("too large")
    assert found.remedy.candidate == "fsdp=4, remat none, 2 microbatches"
    assert found.remedy.changes == ("microbatches 1 -> 2",)
    (found,) = _result(large, others[2]).of("too large")
    assert found.remedy.changes == ("fsdp=4 -> fsdp=8", "microbatches 1 -> 2")
    (found,) = _result(large).of("too large")
    assert found.remedy is None


def test_a_result_survives_json():
    result = _result(_outcome({"fsdp": 4}, step_s=2.0), _outcome({}, over=5))
    assert SearchResult.from_json(result.to_json()) == result
    with pytest.raises(ValueError, match="not a SearchResult"):
        SearchResult.from_json("{}")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_result_can_be_copied_and_hashed_without_its_programs(copied):
    result = search(geometries=[{}])
    assert result.best.plan._source is None  # which holds a lowered module
    again = copied(result)
    assert again == result
    assert {again} == {result}
    assert again.best.candidate.devices == []
    with pytest.raises(ValueError, match="made by a search, so it holds no program. Call strategy"):
        again.best.plan.save("nowhere")


def _shown(result):
    page = io.StringIO()
    Console(file=page, width=160, color_system=None).print(result)
    html = re.sub(r"<style>.*?</style>", "", result._repr_html_(), flags=re.S)
    return [" ".join(x.split()) for x in (page.getvalue(), unescape(re.sub("<[^>]*>", " ", html)))]


@pytest.mark.parametrize("where", [0, 1], ids=["terminal", "notebook"])
def test_a_result_shows_candidates_that_fit_and_changes_for_the_others(where):
    late = Outcome(Candidate("v5e-256", {"fsdp": 64}, "none", 1), "not reached", reason="not begun")
    failed = Outcome(Candidate("v5e-256", {"fsdp": 3}, "none", 1), "failed", reason="ValueError: 3")
    shown = _shown(
        _result(
            _outcome({"fsdp": 256}, "full", step_s=2.5, tokens=1000),
            _outcome({"fsdp": 256, "tensor": 2}, number=4, step_s=2.0, tokens=1000),
            _outcome({"fsdp": 256}, over=2 * plans.GIB),
            _outcome({"tensor": 2}, over=3 * plans.GIB),
            failed,
            late,
        )
    )[where]
    for words in [
        "best on v5e-256: fsdp=256 tensor=2, remat none, 4 microbatches",
        "5 candidates of 6 in 12.0 s",
        "Fits, the fastest first",
        "fsdp=256 tensor=2 none 4 2.00 s 1.80 s to 2.30 s 500",
        "Does not fit (2 of 6)",
        "fsdp=256, remat none: needs",
        "2.00 GiB too much. Biggest: ",
        "It fits with remat none -> full (2.50 s per step, 25% slower than the best).",
        "It fits with tensor=2 -> fsdp=256 tensor=2 and microbatches 1 -> 4 (2.00 s per step,",
        "Failed (1 of 6)",
        "fsdp=3, remat none: ValueError: 3",
        "Not reached within 15.0 min (1 of 6)",
        "not begun: fsdp=64, remat none",
    ]:
        assert words in shown


def test_a_result_without_a_candidate_that_fits_reports_it():
    for shown in _shown(_result(_outcome({}, over=5))):
        assert "no candidate fits v5e-256" in shown
        assert "Nothing that was tried makes it fit." in shown


def test_a_result_with_only_failures_does_not_claim_that_a_candidate_was_too_large():
    failed = Outcome(Candidate("v5e-256", {}, "none", 1), "failed", reason="TypeError: odd")
    late = Outcome(Candidate("v5e-256", {"fsdp": 2}, "none", 1), "not reached", reason="not begun")
    for shown in _shown(_result(failed, late)):
        assert "all that was tried for v5e-256 failed" in shown
        assert "fits" not in shown
    for shown in _shown(_result(late)):
        assert "nothing was compiled for v5e-256 within 15.0 min" in shown


@pytest.mark.parametrize(
    ("best", "other", "told"),
    [
        ((2.0, 100), (3.0, 100), "3.00 s per step, 50% slower than the best"),
        ((2.0, 100), (1.0, 40), "1.00 s per step, 25% slower per token than the best"),
        ((2.0, 100), (1.0, 50), "1.00 s per step, as fast per token as the best"),
        ((2.0, None), (3.0, 100), "3.00 s per step, 50% slower than the best"),
        ((2.0, None), (2.0, None), "2.00 s per step, as fast as the best"),
    ],
)
def test_the_cost_of_a_change_uses_the_ranking_of_candidates(best, other, told):
    result = _result(
        _outcome({"fsdp": 4}, number=2, step_s=best[0], tokens=best[1]),
        _outcome({"tensor": 8}, "full", step_s=other[0], tokens=other[1]),
        _outcome({"tensor": 8}, over=1),
    )
    assert result.best.candidate.geometry == "fsdp=4"
    for shown in _shown(result):
        assert f"It fits with remat none -> full ({told})." in shown


def test_a_step_without_estimated_time_is_shown_without_a_comparison():
    result = _result(
        _outcome({}, "full", step_s=0.0), _outcome({"fsdp": 2}, step_s=0.0), _outcome({}, over=1)
    )
    for shown in _shown(result):
        assert "It fits with remat none -> full." in shown


def test_candidates_within_the_error_bar_of_the_best_are_listed():
    result = _result(
        _outcome({"fsdp": 2}, step_s=2.0, tokens=100),
        _outcome({"fsdp": 4}, step_s=1.1, tokens=50),  # 10 % slower per token
        _outcome({"fsdp": 8}, step_s=2.4, tokens=100),
    )
    told = "theirs within its bar: fsdp=4, remat none. The slice may rank them differently."
    for shown in _shown(result):
        assert "Too close to the best to rank" in shown
        assert told in shown
    alone = _result(_outcome({"fsdp": 2}, step_s=2.0), _outcome({"fsdp": 4}, step_s=4.0))
    assert not any("Too close" in shown for shown in _shown(alone))


def test_names_of_operations_are_escaped_in_html():
    failed = Outcome(Candidate(None, {}, "none", 1), "failed", reason="<script>alert(1)</script>")
    assert "<script>" not in _result(failed)._repr_html_()
    assert search_text.describe_search(_result(failed)).fits is False


@pytest.mark.libtpu
@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_search_on_a_slice_finds_the_change_that_makes_a_layer_of_eight_gigabytes_fit():
    """A layer of 8 GiB with its gradients exceeds one v5e chip, but fits on eight."""

    def large(candidate):
        return make_step(candidate, width=32768, hidden=65536)

    result = search(large, "v5e-8", geometries=[{}, {"fsdp": 8}])
    assert [one.status for one in result.outcomes] == ["fits", "too large"]
    fits, too_large = result.outcomes
    assert fits.candidate.geometry == "fsdp=8"
    assert fits.plan.topology == "v5e-8"
    assert fits.step_s > 0
    assert too_large.plan.refusal.over_bytes > 0
    assert too_large.remedy.changes == ("data parallel -> fsdp=8",)
    again = search(large, "v5e-8", geometries=[{"fsdp": 8}], cache=True, time_budget_s=120)
    assert again.best.plan.program == fits.plan.program
