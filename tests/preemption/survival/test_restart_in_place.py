"""A program that restarts in its process keeps its pid, its connection and its state."""

import os
import subprocess
import sys

import pytest

import tpudist
from places import ROOT
from tpudist.preemption.survival import restart_in_place

UNSUPPORTED = restart_in_place.why_not_supported()
PROGRAM = """
import os, sys
import numpy as np
from tpudist.preemption.survival import restart_in_place
from tpudist.preemption.survival.survivor import StateCopy
from tpudist.processes import json_lines

previous = restart_in_place.take_previous()
assert restart_in_place.take_previous() is None
if previous is None:
    listener = json_lines.Listener("127.0.0.1", "0" * 32, lambda line: line.send(half="line"))
    line = json_lines.connect("127.0.0.1", listener.port, "0" * 32)
    descriptor = os.open(os.path.abspath(__file__), os.O_RDONLY)
    os.set_inheritable(descriptor, True)  # as a library may do
    os.chdir("/")
    print("first", os.getpid(), len(os.listdir("/proc/self/fd")), sys.argv[1:])
    restart_in_place.restart(line, StateCopy(3, {}, {}, {"x": np.arange(4)}))
state = previous.state
print("second", os.getpid(), os.getcwd(), sys.argv[1:], state.commit, state.arrays["x"])
open_files = [os.readlink(f"/proc/self/fd/{i}") for i in range(3, 60)
              if os.path.exists(f"/proc/self/fd/{i}")]
assert not any(x.endswith("program.py") for x in open_files), open_files
"""


@pytest.mark.multiprocess
@pytest.mark.skipif(bool(UNSUPPORTED), reason=UNSUPPORTED)
def test_the_same_process_runs_the_program_again(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, "-X", "utf8", "program.py", "--n", "7"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TPUDIST_FOLDER": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    first, second = (line.split() for line in ended.stdout.splitlines())
    assert first[:2] == ["first", second[1]]
    assert second[2:] == [str(tmp_path), "['--n',", "'7']", "3", "[0", "1", "2", "3]"]


def test_an_unsupported_system_raises(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ValueError, match="in_process=False. is not .* has no in-memory files"):
        tpudist.experimental.survive(lambda survivor: None, in_process=False)
    assert tpudist.experimental.survive(lambda survivor: 5) == 5
