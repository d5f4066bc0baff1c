"""Scheduled functions, simulated: workers and servers fail, and each function has effect once."""

import pytest

from simulation import scheduling
from simulation.faults import Fault, Kind
from simulation.growth import exponent
from simulation.scheduling import KINDS, TIMEOUT_S, ScheduledRun, run_with
from simulation.scheduling_growth import measure_functions

SERVER, WORKER = 0, 2  # the first numbers are servers


@pytest.mark.parametrize("kind", KINDS)
def test_each_function_has_effect_once(kind):
    for seed in range(3):
        outcome, _ = scheduling.run(seed, kind=kind, num_faults=2)
        assert not outcome.problems, f"seed {seed}: {outcome.faults}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_runs_end_well(part):
    """`python scripts/simulate.py --run functions --seeds N` shows the run of a seed that fails."""
    for seed in range(100 * part, 100 * part + 100):
        outcome, _ = scheduling.run(seed)
        assert not outcome.problems, f"seed {seed}: {outcome.faults}"


@pytest.mark.exhaustive
def test_large_runs_end_well():
    for seed in range(5):
        outcome, _ = scheduling.run(seed, 256, num_faults=3)
        assert not outcome.problems, f"seed {seed}: {outcome.faults}"


def test_functions_of_a_killed_worker_run_on_another(tmp_path):
    run = ScheduledRun(2, log=str(tmp_path))
    outcome, _ = run_with(run, [Fault(Kind.CRASH, WORKER, 5.5, 0.0, 1.0)])
    assert not outcome.problems
    assert sum("runs again" in x for x in run.program.logged) == 1
    assert [x.actor.incarnation for x in run.engine.actors.values()] == [0, 0, 0, 0, 1]


def test_a_worker_without_an_answer_is_given_up(tmp_path):
    run = ScheduledRun(2, log=str(tmp_path), closure_timeout_s=TIMEOUT_S)
    outcome, _ = run_with(run, [Fault(Kind.STOP, WORKER, 5.5, 1000.0, 1.0)])
    assert not outcome.problems
    assert any("was given up: it did not finish" in x for x in run.program.logged)


def test_a_server_continues_from_its_log(tmp_path):
    run = ScheduledRun(2, log=str(tmp_path))
    outcome, _ = run_with(run, [Fault(Kind.CRASH, SERVER, 5.5, 0.0, 1.0)])
    assert not outcome.problems
    assert any("continues where its log ends" in x for x in run.program.logged)


def test_a_lost_server_without_a_log_ends_the_run():
    run = ScheduledRun(2)
    run_with(run, [Fault(Kind.CRASH, SERVER, 5.5, 0.0, 1.0)])
    assert run.program.exit_code == 1
    assert "UnavailableError: ps 0 has died" in run.program.printed[-1]


def test_messages_of_a_function_do_not_grow_with_the_workers():
    costs = {n: measure_functions(n, measures_cpu=False) for n in (8, 16, 32, 64)}
    for quantity in ("messages_0", "bytes_0", "messages", "bytes"):
        assert exponent({n: getattr(x, quantity) for n, x in costs.items()}) < 0.05, quantity
