"""Runs that survive losses, simulated: supervisors, generations and faults, from seeds."""

import pytest

from simulation import survival
from simulation.faults import Fault, Kind
from simulation.generation_growth import measure_loss
from simulation.growth import exponent
from simulation.launching import LaunchedRun, surviving_training
from simulation.survival import KINDS, run_with

STEPS = 40


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_continue_or_all_end_for_one_cause(kind):
    for seed in range(2):
        outcome, _ = survival.run(seed, kind=kind, num_faults=1)
        assert not outcome.problems, f"seed {seed}: {outcome.faults}"


def test_several_faults_are_survived_or_named():
    for seed in range(5):
        outcome, _ = survival.run(seed, num_faults=3)
        assert not outcome.problems, f"seed {seed}: {outcome.faults}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_runs_end_well(part):
    """`python scripts/simulate.py --run survival --seeds N` shows the run of a seed that fails."""
    for seed in range(100 * part, 100 * part + 100):
        outcome, _ = survival.run(seed)
        assert not outcome.problems, f"seed {seed}: {outcome.faults}"


@pytest.mark.exhaustive
def test_a_large_run_survives():
    outcome, processes = survival.run(0, 64, Kind.CRASH, 3)
    assert not outcome.problems
    assert sum(x.has_finished for x in processes) >= 61


def finish(run, *faults):
    outcome, _ = run_with(run, faults, result=sum(range(STEPS)))
    assert not outcome.problems
    return outcome


def test_the_first_host_serves_the_others_without_a_process_of_its_own():
    """Its supervisor has the coordination service; with it, the others would lose the run."""
    run = LaunchedRun(3, 1, surviving_training(STEPS, 1.0))
    finish(run, Fault(Kind.CRASH, 0, 3.0, 0.0, 1.0))
    assert [x.exit_code for x in run.supervisors] == [0, 0, 0]
    assert [x.has_finished for x in sorted(run.workers, key=lambda x: x.index)] == [0, 1, 1]


def test_a_first_host_without_any_process_left_gives_up():
    run = LaunchedRun(2, 1, surviving_training(STEPS, 1.0))
    _, processes = run_with(
        run, [Fault(Kind.CRASH, 0, 3.0, 0, 1.0), Fault(Kind.CRASH, 1, 9.0, 0, 1.0)]
    )
    assert all(x.exit_code is not None for x in processes)
    assert run.supervisors[0].exit_code == 70
    assert "no process of this run is left" in run.lines[-1]


@pytest.mark.parametrize("process", [0, 3])
def test_an_error_of_the_program_ends_all_hosts_and_is_named_on_each(process):
    def fault(here, step):
        if here.index == process and step == 3:
            raise ValueError("no such thing")

    run = LaunchedRun(3, 2, surviving_training(STEPS, 1.0, fault), spares=1)
    run.start()
    assert run.simulation.go_on()
    named = f"process {process} raised ValueError: no such thing"
    assert all(any(named in x for x in supervisor.printed) for supervisor in run.supervisors)
    assert {x.exit_code for x in run.supervisors} == {1}
    assert {x.exit_code for x in run.workers} == {0, 1}  # spares end, too


def test_the_loss_of_a_host_is_survived_although_its_kernel_reports_no_end():
    """A collective fails at once, and the supervisor notices the loss after 15 s."""
    run = LaunchedRun(3, 1, surviving_training(STEPS, 1.0), collectives_fail=True)
    finish(run, Fault(Kind.POWER_OFF, 2, 3.2, 0.0, 1.0))
    # While the first host cannot reach the others, its order to continue is late, too.
    run = LaunchedRun(4, 1, surviving_training(STEPS, 1.0), collectives_fail=True)
    faults = Fault(Kind.POWER_OFF, 3, 3.2, 0.0, 1.0), Fault(Kind.SPLIT, 0, 17.2, 9.0, 1.0)
    finish(run, *faults)


def test_a_split_host_and_its_process_both_say_why_they_end():
    run = LaunchedRun(2, 1, surviving_training(STEPS, 1.0), restarts=1)
    finish(run, Fault(Kind.SPLIT, 1, 3.2, 100.0, 1.0))
    assert [x.exit_code for x in run.supervisors] == [0, 70]
    assert [x.exit_code for x in run.workers] == [0, 75]
    assert "Cannot reach the supervisor" in run.supervisors[1].printed[-1]
    assert "supervisor of this run ended or is unreachable" in run.workers[1].printed[-1]


def test_a_rank_0_that_runs_no_python_is_replaced():
    """It would judge the silence of the others; each of them notices its own."""
    run = LaunchedRun(3, 1, surviving_training(STEPS, 1.0), spares=1)
    finish(run, Fault(Kind.BUSY, 0, 3.2, 1400.0, 1.0))
    assert run.workers[0].exit_code == -9
    assert max(x.ended_s for x in run.workers) < 200.0
    assert sum("ending process 0. Process 0 (" in line for line in run.lines) == 1


def test_supervisors_of_other_hosts_send_nothing_while_nothing_changes():
    """If each asked ten times a second, 4,096 hosts would keep the first one busy."""
    run = LaunchedRun(3, 1, lambda process: process.sleep(100.0))
    run.start()
    run.simulation.go_on(10.0)
    before = run.simulation.network.num_messages.copy()
    run.simulation.go_on(90.0)
    assert run.simulation.network.num_messages == before
    assert run.simulation.go_on()


def check_growth(counts):
    costs = {n: measure_loss(n, measures_cpu=False) for n in counts}
    found = {
        name: exponent({n: getattr(x, name) for n, x in costs.items()})
        for name in ("messages_0", "bytes_0", "messages", "bytes")
    }
    assert max(found["messages_0"], found["bytes_0"]) < 1.1
    assert max(found["messages"], found["bytes"]) < 0.1


def test_messages_and_bytes_of_a_loss_grow_linearly():
    check_growth((16, 32, 64))


@pytest.mark.exhaustive
def test_messages_and_bytes_of_a_loss_grow_linearly_up_to_1024_processes():
    check_growth((16, 64, 256, 1024))
