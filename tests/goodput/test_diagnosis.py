"""Diagnoses of synthetic records have the right causes of lost time."""

import json

import pytest

from tpudist.goodput.diagnosis import LOST, REPLAYED, WAITED, diagnose
from tpudist.goodput.run_history import Lifetime, read_run


def start(process=0, began=0.0, ended=100.0, well=True, seconds=None, lines=(), calls=1000):
    last = {"kind": "time", "time": ended, "seconds": {}, "calls": calls}
    lines = [{"kind": "start", "time": began}, *lines, last]
    return Lifetime(process, began, ended, well, seconds or {"step": ended - began}, lines)


def begun(times):
    return [{"kind": "call", "call": k, "began": t} for k, t in enumerate(times)]


def total(diagnosis, process):
    return sum(diagnosis.seconds[process].values())


def test_a_process_that_is_slow_in_each_step_is_reported_and_the_others_wait():
    """The processes run in lockstep: process 1 sleeps 1 s before each call of 1 s."""
    first = begun([2.0 * k for k in range(50)])
    late = begun([2.0 * k + 1 for k in range(50)])
    found = diagnose([{0: start(0, lines=first), 1: start(1, lines=late)}])
    assert found.lateness_s[1] == pytest.approx(49)
    assert found.lateness_s[0] == 0
    assert found.seconds[0][WAITED] == pytest.approx(49)
    assert WAITED not in found.seconds[1]
    assert found.causes[0].text.startswith("process 1 started its steps later")
    assert total(found, 0) == pytest.approx(100)


def test_a_single_pause_is_reported_although_the_others_run_ahead():
    """Process 1 pauses for 10 s before call 20; process 0 starts calls up to 22, and waits."""
    late = begun([k + 0.0 if k < 20 else k + 10.0 for k in range(60)])
    first = begun([k + 0.0 if k <= 22 else k + 10.0 for k in range(60)])
    found = diagnose([{0: start(0, lines=first), 1: start(1, lines=late)}])
    assert found.lateness_s[1] == pytest.approx(10, abs=1)
    assert found.lateness_s[0] < 1


def test_random_differences_between_processes_are_not_a_cause():
    both = [begun([k + 0.001 * ((k * j) % 3) for k in range(60)]) for j in (1, 2)]
    found = diagnose([{i: start(i, lines=both[i]) for i in (0, 1)}])
    assert found.causes == []


def test_a_restart_is_one_cause_with_all_its_lost_time():
    verdict = {"kind": "verdict", "time": 63.0, "message": "Process 1 has ended.\nMore"}
    saves = [{"kind": "save", "time": 30.0, "path": "a", "calls": 400}]
    restore = [{"kind": "restore", "time": 72.0, "path": "a"}]
    after = {"start": 5.0, "step": 30.0}
    run = [
        {
            0: start(0, 0, 63, False, lines=[*saves, verdict], calls=600),
            1: start(1, 0, 60, False, lines=saves, calls=600),
        },
        {i: start(i, 65, 100, seconds=after, lines=restore, calls=600) for i in (0, 1)},
    ]
    found = diagnose(run)
    assert found.causes[0].text == "all processes were restarted: Process 1 has ended."
    assert found.causes[0].seconds == pytest.approx(5 + 10 + 5)  # downtime, repeated work, startup
    for process in (0, 1):
        assert total(found, process) == pytest.approx(100)
        assert found.seconds[process][LOST] == pytest.approx(5)
        assert found.seconds[process][REPLAYED] == pytest.approx(10)


def test_only_later_compiles_are_reported_with_their_cause():
    lines = [
        {"kind": "compile", "function": "f", "cause": "first", "seconds": 50.0, "number": 1},
        {"kind": "compile", "function": "f", "cause": "x was 3", "seconds": 2.0, "number": 2},
        {"kind": "compile", "function": "f", "cause": "x was 4", "seconds": 3.0, "number": 3},
    ]
    (cause,) = diagnose([{0: start(lines=lines)}]).causes
    assert cause.seconds == 5
    assert cause.text == "'f' was compiled again, 2 time(s): x was 4"


def test_a_process_without_records_does_not_shift_the_others(tmp_path):
    """Only process 0 has a file for the first start; both have a file for the second."""
    folder = tmp_path / "goodput"
    folder.mkdir()
    for process, number, began in ((0, 0, 10.0), (0, 1, 50.0), (1, 0, 50.5)):
        facts = {"kind": "start", "process": process, "began": began, "time": began + 1}
        (folder / f"process-{process}-{number:04}.jsonl").write_text(json.dumps(facts) + "\n")
    assert [list(x) for x in read_run(tmp_path)] == [[0], [0, 1]]
    found = diagnose(read_run(tmp_path))
    assert found.causes[0].text == "all processes were restarted: process 0 ended"


@pytest.mark.parametrize("resume", ["resume", "goes on"])
def test_a_change_of_processes_lasts_until_the_first_step_after_it(resume, tmp_path):
    """Earlier versions wrote "goes on"."""
    (tmp_path / "goodput").mkdir()
    lines = [
        {"kind": "start", "process": 0, "began": 0.0, "time": 1.0},
        {"kind": "generation", "number": 1, "why": "a loss", "began": 5.0, "time": 5.5},
        {"kind": resume, "time": 8.0},
        {"kind": "end", "time": 9.0},
    ]
    (tmp_path / "goodput/process-0-0000.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (cause,) = diagnose(read_run(tmp_path)).causes
    assert (cause.seconds, cause.text) == (3, "a loss: the others continued with generation 2")
