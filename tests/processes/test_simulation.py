"""The control plane of many processes, simulated: its growth, and runs with faults from seeds."""

import pytest

from processes import run_processes
from simulation import growth, outcomes
from simulation.faults import KINDS, Fault, Kind
from simulation.growth import exponent
from simulation.operations import MEASURES
from simulation.outcomes import run_with
from simulation.process import Process
from simulation.simulation import Simulation
from tpudist.processes.judge import process_judge

# Exponents of messages and bytes at process 0, and of messages and bytes at any other process.
EXPONENTS = {
    "rendezvous": (1, 1, 0, 0),
    "agreement on a program": (1, 1, 0, 0),
    "barrier of a checkpoint": (1, 1, 0, 0),
    "watch, for a minute": (1, 1, 0, 0),
    "notice of the end, until all stop": (1, 1, 0, 0),
}
LARGEST = 256
# What the service answers: the same from JAX's service and from the simulated one.
SCENARIO = """
def scenario(client):
    def attempt(call, *args):
        try:
            return call(*args)
        except Exception as error:
            text = str(error)
            names = "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"
            return next((x for x in names if x in text), text)

    return [
        attempt(client.key_value_try_get, "a/b"),
        attempt(client.blocking_key_value_get, "a/b", 20),
        attempt(client.key_value_set, "a/b", "1"),
        attempt(client.key_value_set, "a/b", "2"),
        attempt(client.blocking_key_value_get, "a/b", 20),
        attempt(client.key_value_set, "a/b", "3", True),
        attempt(client.key_value_try_get, "a/b"),
        attempt(client.key_value_set, "a/c/d", "4"),
        attempt(client.key_value_set, "ab", "5"),
        sorted(map(list, attempt(client.key_value_dir_get, "a/"))),
        sorted(map(list, attempt(client.key_value_dir_get, "none/"))),
        attempt(client.key_value_delete, "a/c/"),
        sorted(map(list, attempt(client.key_value_dir_get, "a/"))),
        attempt(client.key_value_delete, "a/b"),
        sorted(map(list, attempt(client.key_value_dir_get, "a/"))),
        attempt(client.key_value_try_get, "ab"),
    ]
"""


def run_scenario():
    """Returns the answers of the simulated service."""
    names, answers = {}, []
    exec(SCENARIO, names)
    simulation = Simulation(1)

    def program(process: Process) -> None:
        simulation.connect_jax(process)
        answers.extend(names["scenario"](process.client))

    assert simulation.run(program)
    return answers


def test_the_simulated_service_answers_as_documented():
    answers = run_scenario()
    assert answers[:5] == ["NOT_FOUND", "DEADLINE_EXCEEDED", None, "ALREADY_EXISTS", "1"]
    assert answers[9] == [["a/b", "3"], ["a/c/d", "4"]]
    assert answers[10:] == [[], None, [["a/b", "3"]], None, [], "5"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_jax_answers_as_the_simulated_service_does():
    """Else a simulation shows what would not happen."""
    [answers, _] = run_processes(
        SCENARIO
        + """
import jax
import tpudist
from processes import report
from tpudist.xla import internals

tpudist.emulate()
tpudist.MultiWorkerMirroredStrategy()
report(None if jax.process_index() else scenario(internals.coordination_client()))
jax.distributed.shutdown()
"""
    )
    assert answers.result == run_scenario()


def test_one_seed_gives_one_run():
    """A seed that fails can be replayed."""
    first = [outcomes.run(seed) for seed in range(5)]
    again = [outcomes.run(seed) for seed in range(5)]
    assert [x.fingerprint for x, _ in first] == [x.fingerprint for x, _ in again]
    texts = [[x.printed + x.logged for x in processes] for _, processes in first]
    assert texts == [[x.printed + x.logged for x in processes] for _, processes in again]
    assert len({x.fingerprint for x, _ in first}) == 5


def check_exponents(name, counts):
    costs = {n: MEASURES[name](n, measures_cpu=False) for n in counts}
    for quantity, bound in zip(
        ("messages_0", "bytes_0", "messages", "bytes"), EXPONENTS[name], strict=True
    ):
        found = exponent({n: getattr(x, quantity) for n, x in costs.items()})
        assert found < bound + 0.1, quantity


@pytest.mark.parametrize("name", EXPONENTS)
def test_messages_and_bytes_grow_linearly_at_process_0_and_not_at_others(name):
    check_exponents(name, (8, 16, 32))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPONENTS)
def test_they_grow_so_up_to_4096_processes(name):
    check_exponents(name, growth.COUNTS)


def test_the_exponent_of_a_power_is_its_exponent():
    assert exponent({n: 3.0 * n**2 for n in (16, 64, 256)}) == pytest.approx(2)
    assert exponent({n: 5.0 for n in (16, 64, 256)}) == pytest.approx(0)


@pytest.mark.parametrize("kind", KINDS)
def test_all_continue_or_all_end_and_name_the_process(kind):
    for seed in range(3):
        outcome, _ = outcomes.run(seed, kind=kind, num_faults=1)
        assert not outcome.problems, f"seed {seed}: {outcome.faults}"


def test_runs_with_several_faults_end_well():
    for seed in range(5):
        outcome, _ = outcomes.run(seed, num_faults=3)
        assert not outcome.problems, f"seed {seed}: {outcome.faults}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_runs_end_well(part):
    """`python scripts/simulate.py --seeds N` shows the run of a seed that fails."""
    for seed in range(100 * part, 100 * part + 100):
        outcome, _ = outcomes.run(seed)
        assert not outcome.problems, f"seed {seed}: {outcome.faults}"


@pytest.mark.exhaustive
def test_large_runs_end_well():
    for seed in range(5):
        outcome, _ = outcomes.run(seed, LARGEST, num_faults=2)
        assert not outcome.problems, f"seed {seed}: {outcome.faults}"


def test_runs_without_a_fault_finish():
    for count, per_host in ((1, 1), (3, 1), (8, 4), (16, 16)):
        outcome, processes = run_with(Simulation(count, per_host=per_host), [])
        assert not outcome.problems
        assert all(x.has_finished and not x.printed for x in processes)


@pytest.mark.parametrize("process", [0, 2])
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [(Kind.STOP, 14), (Kind.BUSY, 79), (Kind.SPLIT, 9), (Kind.SLOW_LINK, 400)],
)
def test_a_fault_that_harms_nobody_ends_no_run(kind, seconds, process):
    fault = Fault(kind, process, 5.0, seconds, slowness=2000.0)
    assert fault.is_harmless
    outcome, processes = run_with(Simulation(4, per_host=2), [fault])
    assert not outcome.problems
    assert all(x.has_finished for x in processes)


def test_processes_that_all_run_no_python_for_a_while_continue():
    """No process was silent for longer than the others."""
    faults = [Fault(Kind.BUSY, i, 5.0, 101.0 if i == 0 else 100.0, 1.0) for i in range(4)]
    _, processes = run_with(Simulation(4), faults)
    assert all(x.has_finished for x in processes)


def causes_of(simulation, *faults):
    outcome, processes = run_with(simulation, faults)
    assert not outcome.problems
    return {outcomes.cause_of(x) for x in processes if x.exit_code in (1, 75)}


def test_a_process_that_ends_because_process_0_was_silent_is_not_the_cause():
    """It knows that process 0 was stopped, which processes of other hosts do not."""
    stopped = Fault(Kind.STOP, 0, 5.0, 31.0, 1.0)
    assert causes_of(Simulation(4, per_host=2), stopped) == {"0"}


def test_a_dead_process_is_named_although_process_0_could_reach_nobody():
    """When the network is back, all others have been silent, too."""
    faults = Fault(Kind.SPLIT, 0, 5.0, 4.2, 1.0), Fault(Kind.CRASH, 2, 6.3, 0.0, 1.0)
    assert causes_of(Simulation(4), *faults) == {"2"}


def test_process_0_is_named_if_it_dies_while_jax_starts():
    """JAX's own error names nobody."""
    causes = set()
    for tenths_ms in range(30, 46, 2):
        dies = Fault(Kind.CRASH, 0, tenths_ms / 1e4, 0.0, 1.0)
        causes |= causes_of(Simulation(8), dies)
    assert causes == {"0"}


def test_a_defect_of_the_judge_is_logged_once(monkeypatch):
    """The thread that reports ignores errors of the service."""

    def judge(self, reports):
        raise KeyError("defect")

    monkeypatch.setattr(process_judge.Judge, "judge", judge)
    _, (first, second) = outcomes.run(0, 2, Kind.CLOCK_JUMP, 1)
    assert "".join(first.logged).count("cannot compare the reports") == 1
    assert "cannot compare" not in "".join(second.logged)


def test_a_jump_of_a_clock_disturbs_no_process():
    outcome, processes = outcomes.run(0, 8, Kind.CLOCK_JUMP, 1)
    assert [x.kind for x in outcome.faults] == [Kind.CLOCK_JUMP]
    assert outcome.cause == ""
    assert all(x.has_finished for x in processes)
