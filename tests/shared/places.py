"""Paths of the repository and its parts."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
PACKAGE = ROOT / "tpudist"
DATA = TESTS / "data"
PROGRAMS = TESTS / "child_programs"
SHARED = TESTS / "shared"

# For a process that a test starts: the package, and the modules that tests and programs share.
PYTHONPATH = os.pathsep.join(map(str, (ROOT, TESTS, SHARED, PROGRAMS)))
