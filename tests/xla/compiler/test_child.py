import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from places import PYTHONPATH
from tpudist.xla.compiler import child

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def start(monkeypatch):
    """Starts `answering_program.py`; ends it with the test."""
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    started = []

    def start(idle_s=60.0):
        started.append(child.Child("answering_program", {"IDLE_S": str(idle_s)}))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_child_answers_repeatedly_although_libraries_print(start):
    one = start()
    for number in range(3):
        found, payload = one.ask({"do": "sum", "numbers": [1, number]}, b"abc" * number)
        assert found == {"sum": 1 + number, "pid": one.pid}
        assert payload == (b"abc" * number)[::-1]
    megabytes = os.urandom(1 << 22)
    assert one.ask({"do": "sum", "numbers": []}, megabytes)[1] == megabytes[::-1]


def test_the_error_of_a_dead_child_contains_its_last_output(start):
    one = start()
    with pytest.raises(child.Died, match="the last words") as raised:
        one.ask({"do": "abort"})
    assert raised.value.ending == "signal SIGABRT"
    assert not one.is_alive


def test_asking_a_child_that_has_exited_raises_not_sent(start):
    one = start(idle_s=0.0)
    one._process.wait(timeout=60)
    with pytest.raises(child.NotSent):
        one.ask({"do": "sum", "numbers": [1]}, os.urandom(1 << 20))


def test_an_interrupted_wait_ends_the_child(start):
    """Otherwise the next question would receive the answer to this one."""
    one = start()
    ticks = []

    def interrupt(seconds):
        ticks.append(seconds)
        if len(ticks) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.ask({"do": "sleep", "seconds": 600}, tick=interrupt)
    assert ticks == sorted(ticks)
    assert not one.is_alive


def test_files_in_the_current_folder_do_not_shadow_libraries(start, tmp_path, monkeypatch):
    for library in ("selectors", "struct", "jax", "answering_program"):
        (tmp_path / f"{library}.py").write_text("raise RuntimeError('the user has a file here')")
    monkeypatch.chdir(tmp_path)
    assert start().ask({"do": "sum", "numbers": [2]})[0]["sum"] == 2


@pytest.mark.parametrize("installed", [True, False])
def test_the_package_is_last_on_the_path_and_never_before_the_standard_library(
    monkeypatch, installed
):
    root = str(Path(child.__file__).parents[3])
    if installed:
        monkeypatch.setattr(child.sysconfig, "get_path", lambda name: root)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/first", "", "/second"]))
    assert child._paths() == ["/first", "/second", *([] if installed else [root])]


def test_a_process_with_thousands_of_open_files_can_ask(start):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1200  # `select` supports only descriptors below 1024
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"no more than {hard} files can be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    opened = []
    try:
        while not opened or opened[-1] < 1100:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        one = start()
        assert one._process.stdout.fileno() > 1024
        assert one.ask({"do": "sum", "numbers": [3]})[0]["sum"] == 3
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, None])
def test_a_child_ends_with_the_process_that_started_it(ending):
    """The process is killed, interrupted or ends while the child is busy, or idle (None)."""
    program = textwrap.dedent(f"""
        import signal
        # Ignored in what a shell began with &.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from answering_program import child
        one = child.Child("answering_program", {{"IDLE_S": "600"}})
        one.ask({{"do": "sum", "numbers": []}})
        print(one.pid, flush=True)
        if {ending is not None}:
            one.ask({{"do": "sleep", "seconds": 600}})
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    with parent:
        pid = int(parent.stdout.readline())
        if ending is not None:
            parent.send_signal(ending)
        parent.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie, not yet reaped by its parent
