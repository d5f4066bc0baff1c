"""`tpudist launch` with real processes of a small program that exit, fail and hang."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from places import ROOT
from tpudist import cli
from tpudist.cli import launch_command
from tpudist.supervisor import launch

COMMAND = [sys.executable, "-m", "tpudist", "launch"]


def start(tmp_path, program, *options, args=()):
    script = tmp_path / "program.py"
    script.write_text(program)
    env = os.environ | {"PYTHONPATH": str(ROOT), "PLACE": str(tmp_path)}
    return subprocess.Popen(
        [*COMMAND, *options, str(script), *args],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command in this process, which spares the start of another one."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PLACE", str(tmp_path))

    def run(program, *options, args=()):
        script = tmp_path / "program.py"
        script.write_text(program)
        code = cli.main(["launch", *options, str(script), *args])
        return code, capsys.readouterr().out.splitlines()

    return run


def is_running(number):
    try:
        status = Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_process_has_its_task_and_its_prefix(run):
    program = (
        "import os, sys\n"
        "print(os.environ['TF_CONFIG'], os.environ['TPUDIST_EMULATE'], sys.argv[1:])"
    )
    code, lines = run(program, "-n", "3", "--devices-per-process", "2", args=["--n", "7", "-x"])
    assert code == 0
    assert sorted(x[:4] for x in lines) == ["[0] ", "[1] ", "[2] "]
    for line in lines:
        place, end = json.JSONDecoder().raw_decode(line[4:])
        assert place["task"] == {"type": "worker", "index": int(line[1])}
        assert len(set(place["cluster"]["worker"])) == 3
        assert line[4 + end :] == " 2 ['--n', '7', '-x']"


def test_an_error_of_the_program_is_not_restarted(run):
    program = (
        "import json, os, sys, time\nif '\"index\": 1' in os.environ['TF_CONFIG']: sys.exit(3)"
    )
    code, lines = run(program, "-n", "2", "--restarts", "5")
    assert code == 3
    assert lines == [
        "[tpudist] process 1 exited with code 3: this is an error of the program, so a "
        "restart would fail again."
    ]


def test_the_launcher_does_not_import_jax(tmp_path):
    """Its import takes half a second, before the processes start theirs on the same cores."""
    script = tmp_path / "program.py"
    script.write_text("print('well')")
    program = f"""
import sys
from tpudist import cli
code = cli.main(["launch", "-n", "2", "--devices-per-process", "1", {str(script)!r}])
print(code, {{"jax", "jaxlib", "flax"}} & set(sys.modules))
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == "0 set()"


def test_the_launcher_looks_at_its_processes_when_one_has_ended(run, monkeypatch):
    """It would take time from them otherwise, which grows with their number."""
    turns, collect = [], launch._Attempt._collect_ended
    monkeypatch.setattr(
        launch._Attempt, "_collect_ended", lambda *args: turns.append(1) or collect(*args)
    )
    monkeypatch.setattr(launch, "_CHECK_S", 600.0)
    code, _ = run("import time; time.sleep(0.5)", "-n", "4")
    assert code == 0
    assert len(turns) <= 1 + 4


# Process 1 raises, and process 0 ends with the code of a lost peer just after that.
CAUSE = """
import os, sys
from pathlib import Path
file = Path(os.environ["PLACE"], "cause")
if '"index": 1' in os.environ["TF_CONFIG"]:
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    sys.exit(1)
while not file.exists(): pass
status = Path("/proc", file.read_text(), "stat")
try:
    while status.read_text().rpartition(")")[2].split()[0] != "Z": pass
except (FileNotFoundError, ProcessLookupError): pass
sys.exit(75)
"""


def test_the_cause_counts_although_a_process_that_lost_it_ends_in_the_same_turn(run, monkeypatch):
    monkeypatch.setattr(launch.Wakeups, "wait", lambda wakeups, timeout_s: time.sleep(0.5))
    code, lines = run(CAUSE, "-n", "2", "--restarts", "1")
    assert code == 1
    assert lines == [
        "[tpudist] process 1 exited with code 1: this is an error of the program, so a "
        "restart would fail again."
    ]


# Fails as often as the file is long, by the exit code or signal that is its argument.
FLAKY = """
import os, sys
if '"index": 1' in os.environ["TF_CONFIG"]:
    file = os.path.join(os.environ["PLACE"], "times")
    with open(file, "a") as f: f.write("x")
    if os.path.getsize(file) <= 2:
        code = int(sys.argv[1])
        if code < 0: os.kill(os.getpid(), -code)
        sys.exit(code)
print("well")
"""


@pytest.mark.parametrize("code", ["75", "-9", "143"])
def test_lost_or_killed_processes_restart(run, code):
    found, lines = run(FLAKY, "-n", "2", "--restarts", "2", args=[code])
    assert found == 0
    ended = "was killed (SIGKILL)" if code == "-9" else f"exited with code {code}"
    assert [x for x in lines if "tpudist" in x] == [
        f"[tpudist] process 1 {ended}: restarting all processes ({k} restart(s) left)."
        for k in (2, 1)
    ]
    assert lines[-2:] == ["[0] well", "[1] well"] or lines[-2:] == ["[1] well", "[0] well"]


def test_the_number_of_restarts_is_limited(run, tmp_path):
    code, lines = run(FLAKY, "-n", "2", "--restarts", "1", args=["75"])
    assert code == launch.EXIT_GAVE_UP
    assert lines[-1] == "[tpudist] process 1 exited with code 75: giving up after 1 restart(s)."
    (tmp_path / "times").unlink()
    assert run(FLAKY, "-n", "2", args=["75"])[0] == 75
    (tmp_path / "times").unlink()
    code, lines = run(FLAKY, "-n", "2", args=["-9"])
    assert code == 128 + 9
    assert lines[-1] == (
        "[tpudist] process 1 was killed (SIGKILL): giving up. --restarts N starts again from the "
        "last checkpoint."
    )


# Starts a child of its own, and says the numbers of both.
PARENTS = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
name = os.path.join(os.environ["PLACE"], f"of {os.getpid()}")
with open(name + ".new", "w") as f: f.write(f"{os.getpid()} {child.pid}")
os.rename(name + ".new", name)
if "fail" in sys.argv and '"index": 0' in os.environ["TF_CONFIG"]: sys.exit(1)
time.sleep(600)
"""


def numbers_in(tmp_path):
    files = [x for x in tmp_path.glob("of *") if x.suffix != ".new"]
    return [int(x) for file in files for x in file.read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_reaches_all_processes_and_their_children(tmp_path, number):
    process = start(tmp_path, PARENTS, "-n", "2")
    wait_until(lambda: len(numbers_in(tmp_path)) == 4)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    wait_until(lambda: not any(map(is_running, numbers_in(tmp_path))))


@pytest.mark.slow
def test_a_second_signal_kills_at_once(tmp_path):
    process = start(tmp_path, PARENTS, "-n", "2", args=["deaf"])
    wait_until(lambda: len(numbers_in(tmp_path)) == 4)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=20)
    assert "killing process" in stdout
    assert " 0, " in stdout
    wait_until(lambda: not any(map(is_running, numbers_in(tmp_path))))


def test_processes_that_outlive_a_failed_one_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "END_S", 0.5)
    monkeypatch.setenv("PLACE", str(tmp_path))
    script, lines = tmp_path / "program.py", []
    script.write_text(PARENTS)
    command = [sys.executable, str(script), "fail"]
    launched = launch.Launch(command, 2, None, 0, lambda index, line: lines.append(line))
    assert launched.run() == 1
    assert lines[0] == "killing process 1, still running."
    wait_until(lambda: not any(map(is_running, numbers_in(tmp_path))))


@pytest.mark.slow
def test_the_processes_die_with_their_supervisor(tmp_path):
    process = start(tmp_path, PARENTS, "-n", "2")
    wait_until(lambda: len(numbers_in(tmp_path)) == 4)
    workers = [int(x.name[3:]) for x in tmp_path.glob("of *")]
    children = set(numbers_in(tmp_path)) - set(workers)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(is_running, workers)), timeout_s=2)
    for child in children:  # which the kernel leaves: what a worker starts is its own to watch
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-n", "0", "x.py"], "--num-processes 0: must be at least 1."),
        (["--devices-per-process", "0", "x.py"], "--devices-per-process 0: must be at least 1"),
        (["--restarts", "-1", "x.py"], "--restarts -1: must be at least 0"),
        (["nothing.py"], "nothing.py: no such file in"),
        (["no-such-program"], "no-such-program: no such program. A Python file must"),
        (["--processes", "2", "x.py"], "no option --processes. Did you mean --num-processes?"),
        (["--emulate=2", "--", "x.py"], "launch has no option --emulate. Options of the program"),
    ],
)
def test_wrong_use_prints_one_line(args, said, capsys):
    assert cli.main(["launch", *args]) == 2
    assert said in capsys.readouterr().err


PROGRAM = """
import jax, os, sys
import numpy as np
import tpudist
strategy = tpudist.MultiWorkerMirroredStrategy()
def step(x): return tpudist.get_replica_context().all_reduce("sum", x)
ones = strategy.experimental_distribute_values_from_function(lambda _: np.ones(1, np.float32))
file = os.path.join(os.environ["PLACE"], "killed")
for i in range(20):
    total = strategy.run(step, (ones,))
    float(np.asarray(total.addressable_data(0))[0])
    if i == 10 and jax.process_index() == int(sys.argv[1]) and not os.path.exists(file):
        open(file, "w").close()
        os.kill(os.getpid(), 9)
print("sum", float(np.asarray(total.addressable_data(0))[0]))
"""


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("killed", ["0", "1"])
def test_a_run_with_a_killed_process_restarts_and_succeeds(run, killed):
    options = ("-n", "2", "--devices-per-process", "2", "--restarts", "1")
    code, lines = run(PROGRAM, *options, args=[killed])
    assert code == 0, lines
    assert f"Process {killed} ended without a message" in "\n".join(lines)
    assert {"[0] sum 4.0", "[1] sum 4.0"} <= set(lines)


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("-n 2 a.py -x", "-n 2 a.py"),
        ("-n2 a.py -n 3", "-n2 a.py"),
        ("--num-processes=2 --restarts 1 a.py", "--num-processes=2 --restarts 1 a.py"),
        ("-- a.py --help", "-- a.py"),
        ("--help", "--help"),
        ("a.py", "a.py"),
    ],
)
def test_arguments_after_the_program_belong_to_it(line, first):
    words = line.split()
    number = len(first.split())
    assert launch_command.split_at_program(words) == (words[:number], words[number:])
