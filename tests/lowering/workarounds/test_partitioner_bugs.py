"""Each known bug of XLA still occurs; when a test fails, its workaround can be deleted."""

import os
import subprocess
import sys

import jaxlib
import pytest

from places import ROOT
from tpudist.lowering.workarounds.partitioner_bugs import BUGS


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "pick" else pytest.mark.slow) for x in BUGS]
)
def test_the_bug_still_occurs(name):
    bug = BUGS[name]
    done = subprocess.run(
        [sys.executable, "-m", "tpudist.lowering.workarounds.partitioner_bugs", name],
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        capture_output=True,
        text=True,
    )
    seen = jaxlib.__version__ in bug.versions
    assert (done.returncode != 0) == seen, (
        f"jaxlib {jaxlib.__version__} {'no longer has' if seen else 'has'} the bug '{name}'. Name "
        f"the version in BUGS, or, when no supported jaxlib has it, delete {bug.workaround}."
    )
    if seen:
        assert bug.message in done.stderr


@pytest.mark.parametrize("name", BUGS)
def test_the_module_with_the_workaround_exists(name):
    path = ROOT / (BUGS[name].workaround.replace(".", "/") + ".py")
    assert path.exists()
