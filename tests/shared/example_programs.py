"""The programs of `examples/`, as modules: each kind stands in a folder, plain and distributed."""

import difflib
import importlib.util
from types import ModuleType

from places import ROOT

FOLDER = ROOT / "examples"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/plain.py"))


def load(name: str, kind: str) -> ModuleType:
    """Runs the file again: it defines new functions, which nothing has compiled yet."""
    path = FOLDER / name / f"{kind}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_{kind}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def num_changed_lines(name: str) -> int:
    """Lines that were added, removed or changed, as `diff -B` counts them: without empty ones."""
    texts = [(FOLDER / name / f"{kind}.py").read_text() for kind in ("plain", "distributed")]
    plain, distributed = ([x for x in text.splitlines() if x.strip()] for text in texts)
    matcher = difflib.SequenceMatcher(None, plain, distributed, autojunk=False)
    return sum(
        max(end - start, new_end - new_start)
        for tag, start, end, new_start, new_end in matcher.get_opcodes()
        if tag != "equal"
    )
