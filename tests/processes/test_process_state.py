"""The state of a process, as the kernel reports it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tpudist.processes import process_state
from tpudist.processes.judge import process_silence
from tpudist.processes.process_state import State

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as process:
        yield process
        process.kill()


def place_of(process):
    return process_state.here().replace(f" {os.getpid()} ", f" {process.pid} ")


def wait_for(place, state):
    deadline = time.monotonic() + 10
    while process_state.find(place) is not state:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_state_of_a_process_is_read_from_the_kernel(process):
    place = place_of(process)
    assert process_state.find(process_state.here()) is State.RUNNING
    wait_for(place, State.RUNNING)
    process.send_signal(signal.SIGSTOP)
    wait_for(place, State.STOPPED)
    assert process_silence.describe_silence(3, 7.2, place).limit_s == process_silence.STOPPED_S
    process.send_signal(signal.SIGCONT)
    wait_for(place, State.RUNNING)
    process.kill()  # a zombie, until somebody waits for it
    wait_for(place, State.GONE)
    process.wait()
    wait_for(place, State.GONE)
    silence = process_silence.describe_silence(3, 7.2, place)
    assert silence.text.startswith(f"Process 3 (pid {process.pid} on ")
    assert silence.text.endswith("has not reported for 7 s: it no longer exists.")


def test_the_state_of_a_process_on_another_host_is_unknown():
    here = process_state.here()
    _, rest = here.split(" ", 1)
    elsewhere = f"other/pid:[1] {rest}"
    assert process_state.find(elsewhere) is None
    assert process_state.describe(elsewhere) == process_state.describe(here)
    assert process_silence.describe_silence(0, 5, elsewhere).limit_s == process_silence.SILENT_S
