"""`tpudist run`: the program runs as under `python`."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from places import ROOT
from tpudist import cli

COMMAND = [sys.executable, "-m", "tpudist", "run"]
PROGRAM = """
import os, sys
print(sys.argv[1:], os.environ.get("JAX_NUM_CPU_DEVICES"), os.environ.get("TPUDIST_GOODPUT"))
print(os.isatty(0), input(), file=sys.stderr)
sys.exit(7)
"""


def start(tmp_path, *options, program=PROGRAM, **streams):
    script = tmp_path / "program.py"
    script.write_text(program)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | streams
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    env.pop("TPUDIST_GOODPUT", None)
    env.pop("JAX_NUM_CPU_DEVICES", None)
    return subprocess.Popen([*COMMAND, *options, str(script), "--n", "7"], env=env, **streams)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_program_receives_its_arguments_streams_and_exit_code(tmp_path):
    process = start(tmp_path, stdin=subprocess.PIPE)
    assert process.communicate("said", timeout=60) == ("['--n', '7'] None None\n", "False said\n")
    assert process.returncode == 7


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_program_has_the_terminal_and_emulated_devices(tmp_path):
    """Devices are emulated for a program that does not request them."""
    ours, its = pty.openpty()
    program = f"import jax\nprint(len(jax.devices()))\n{PROGRAM}"
    process = start(tmp_path, "--emulate", "3", "--goodput", "notes", program=program, stdin=its)
    os.write(ours, b"typed\n")
    assert process.communicate(timeout=60) == ("3\n['--n', '7'] 3 notes\n", "True typed\n")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_program_receives_signals(tmp_path):
    program = "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()"
    process = start(tmp_path, program=program)
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.py"], "no such file"),
        (["--emulate", "0", sys.executable], "must be at least 1"),
    ],
)
def test_wrong_options_are_reported(words, said, capsys):
    assert cli.main(["run", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
