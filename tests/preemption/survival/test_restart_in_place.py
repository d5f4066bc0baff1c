"""A program that replaces itself keeps its process, its connection and its state."""

import os
import subprocess
import sys

import pytest

import tpudist
from places import ROOT
from tpudist.preemption.survival import restart_in_place

PROGRAM = """
import os, sys
import numpy as np
from tpudist.preemption.survival import restart_in_place
from tpudist.preemption.survival.survivor import StateCopy
from tpudist.processes import json_lines

kept = restart_in_place.take()
assert restart_in_place.take() is None
if kept is None:
    listener = json_lines.Listener("127.0.0.1", "0" * 32, lambda line: line.send(half="line"))
    line = json_lines.connect("127.0.0.1", listener.port, "0" * 32)
    held = os.open(os.path.abspath(__file__), os.O_RDONLY)
    os.set_inheritable(held, True)  # as a library may that knows nothing of this
    os.chdir("/")
    print("first", os.getpid(), len(os.listdir("/proc/self/fd")), sys.argv[1:])
    restart_in_place.restart(line, StateCopy(3, {}, {}, {"x": np.arange(4)}))
print("second", os.getpid(), os.getcwd(), sys.argv[1:], kept.state.commit, kept.state.arrays["x"])
open_files = [os.readlink(f"/proc/self/fd/{i}") for i in range(3, 60)
              if os.path.exists(f"/proc/self/fd/{i}")]
assert not any(x.endswith("program.py") for x in open_files), open_files
"""


@pytest.mark.multiprocess
@pytest.mark.skipif(bool(restart_in_place.why_not()), reason=restart_in_place.why_not())
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


def test_where_it_cannot_be_it_is_refused(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ValueError, match="in_process=False. is not .* has no in-memory files"):
        tpudist.experimental.survive(lambda survivor: None, in_process=False)
    assert tpudist.experimental.survive(lambda survivor: 5) == 5
