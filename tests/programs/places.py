"""Where the repository and its parts are."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
PACKAGE = ROOT / "tpudist"
DATA = TESTS / "data"
PROGRAMS = TESTS / "programs"
