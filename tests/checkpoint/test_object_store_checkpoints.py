"""Checkpoints in Google Cloud Storage (an emulator on loopback); other stores are rejected."""

import json
import subprocess
import sys

import numpy as np
import pytest

from places import ROOT
from tpudist.checkpoint import Checkpoint, CheckpointManager

ARANGE = np.arange(8.0)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_checkpoints_in_gcs_are_saved_verified_restored_and_replaced():
    pytest.importorskip("gcsfs", reason="needs the extra `remote`")
    pytest.importorskip("gcp_storage_emulator", reason="the server of GCS")
    program = ROOT / "tests" / "child_programs" / "checkpoints_in_gcs.py"
    run = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    (line,) = [x for x in run.stdout.splitlines() if x.startswith("REPORT ")]
    report = json.loads(line.removeprefix("REPORT "))
    assert report == {
        "kept": ["gs://bkt/run/2", "gs://bkt/run/3"],
        "restored": (3 * ARANGE).tolist(),
        "after damage": (2 * ARANGE).tolist(),
        "warned": True,
        "read": (2 * ARANGE).tolist(),
        "ids": [[1, 2], [3]],
        "indexes": 1,
    }


@pytest.mark.parametrize("path", ["s3://bucket/run", "az://bucket/run", "https://host/run"])
def test_stores_that_orbax_cannot_write_to_are_rejected_before_a_request(path):
    """Orbax fails during a save to S3, when the older checkpoint at the path is deleted already."""
    checkpoint = Checkpoint(step=1)
    for call in (
        lambda: CheckpointManager(checkpoint, path),
        lambda: checkpoint.write(path),
        lambda: checkpoint.save(path),
        lambda: checkpoint.read(path),
    ):
        with pytest.raises(ValueError, match=rf"to {path}.* Orbax supports .*Mount the bucket"):
            call()
