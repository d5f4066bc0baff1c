"""The snippets of docs/data_and_checkpoints.md run one after the other, as it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.multiprocess
def test_the_snippets_about_data_and_checkpoints_run_one_after_the_other(tmp_path):
    guide = (ROOT / "docs" / "data_and_checkpoints.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S)
    (tmp_path / "notes.txt").write_text("".join(f"line {i}\n" for i in range(9)))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(snippets)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "40 steps; saved: [20, 30, 40]" in done.stdout
    assert "Restored 2 values of step 40" in done.stdout
    assert "FileDataset" in done.stdout
