"""Threads that are left behind in C++ when their process ends."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading, time
from tpudist.processes import generations

wait = threading.Thread(target=lambda: ctypes.CDLL(None).sleep(100), daemon=True)
wait.start()
generations.forget(wait)
time.sleep(0.1)
sys.platform = sys.argv[1]  # read by the exit handler
"""


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_a_process_ends_while_a_thread_waits_in_c(platform):
    """macOS has no real-time signals, and Windows has no signals for threads."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, platform], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
