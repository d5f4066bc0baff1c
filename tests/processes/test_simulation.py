"""The control plane of many processes, simulated: its growth, and runs with faults from seeds."""

import pytest

from processes import run_processes
from simulation import faults, growth
from simulation.faults import Kind
from simulation.growth import OPERATIONS, exponent, measure
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
    first = [faults.run(seed) for seed in range(5)]
    again = [faults.run(seed) for seed in range(5)]
    assert [x.fingerprint for x, _ in first] == [x.fingerprint for x, _ in again]
    texts = [[x.printed + x.logged for x in processes] for _, processes in first]
    assert texts == [[x.printed + x.logged for x in processes] for _, processes in again]
    assert len({x.fingerprint for x, _ in first}) == 5


def check_exponents(name, counts):
    operation = next(x for x in OPERATIONS if x.name == name)
    costs = {n: measure(operation, n, measures_cpu=False) for n in counts}
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


@pytest.mark.parametrize("kind", Kind)
def test_all_go_on_or_all_end_and_name_the_process(kind):
    for seed in range(3):
        outcome, _ = faults.run(seed, kind=kind)
        assert not outcome.problems, f"seed {seed}: {outcome.fault}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_runs_end_well(part):
    """`python scripts/simulate.py --seeds N` shows the run of a seed that fails."""
    for seed in range(100 * part, 100 * part + 100):
        outcome, _ = faults.run(seed)
        assert not outcome.problems, f"seed {seed}: {outcome.fault}"


def test_a_defect_of_the_judge_is_logged_once(monkeypatch):
    """The thread that reports ignores errors of the service."""

    def judge(self, reports):
        raise KeyError("defect")

    monkeypatch.setattr(process_judge.Judge, "judge", judge)
    _, (first, second) = faults.run(0, 2, Kind.CLOCK_JUMP)
    assert "".join(first.logged).count("cannot compare the reports") == 1
    assert "cannot compare" not in "".join(second.logged)


def test_a_jump_of_a_clock_disturbs_no_process():
    outcome, processes = faults.run(0, 8, Kind.CLOCK_JUMP)
    assert outcome.fault.kind is Kind.CLOCK_JUMP
    assert outcome.cause == ""
    assert all(x.has_finished for x in processes)
