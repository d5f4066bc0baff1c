"""ProcessGuard: background processes of a command end with the program, however it ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from process_trees import are_gone, descendants
from tpudist.engine.process_guard import LOG, ProcessGuard

# Starts a process in a session of its own, as servers do, and ends; the process starts another.
SERVER = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
COMMAND = (
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SERVER!r}], "
    "start_new_session=True); print('it runs', flush=True)"
)
PROGRAM = """
import os, pathlib, sys
from tpudist.engine.process_guard import ProcessGuard

guard = ProcessGuard([sys.executable, "-c", sys.argv[1]], pathlib.Path(sys.argv[2]), os.environ,
                     timeout_s=30)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "of the command"
    folder.mkdir()
    return folder


def wait_for(how_many, of):
    """Waits for a number of descendants of a process, and returns them."""
    end_s = time.monotonic() + 10
    while len(found := descendants(of)) < how_many and time.monotonic() < end_s:
        time.sleep(0.02)
    assert len(found) == how_many
    return found


def test_close_ends_background_processes_and_removes_the_folder(folder):
    before = descendants(os.getpid())
    guard = ProcessGuard([sys.executable, "-c", COMMAND], folder, os.environ, timeout_s=30)
    assert (folder / LOG).read_text() == "it runs\n"
    started = wait_for(len(before) + 3, os.getpid()) - before  # the guard, the server, its child
    guard.close()
    guard.close()
    assert are_gone(started, within_s=0)
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_program_takes_its_processes_along(folder, number):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, COMMAND, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with program:
        assert program.stdout.readline() == b"ready\n"
        started = wait_for(3, program.pid)
        for process in started:  # a signal to a job reaches all of its processes
            os.kill(process.pid, signal.SIGTERM if process.name.startswith("python") else 0)
        program.send_signal(number)
    assert are_gone(started, within_s=10)
    assert not folder.exists()


def test_the_error_of_a_command_contains_its_output(folder):
    command = [sys.executable, "-c", "print('no such port'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3\.\nno such port"):
        ProcessGuard(command, folder, os.environ, timeout_s=30)
    assert not folder.exists()


def test_a_command_times_out(folder):
    before = descendants(os.getpid())
    with pytest.raises(RuntimeError, match="`sleep 600` did not finish within 0.3 s"):
        ProcessGuard(["sleep", "600"], folder, os.environ, timeout_s=0.3)
    assert descendants(os.getpid()) == before
    assert not folder.exists()
