"""Runs the programs of docs/complete_programs.md, and records what those for TensorFlow print.

    cd tests && python -m parity.porting

PARITY_PYTHON names an interpreter that has TensorFlow, if this one has not.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from processes import run_processes

from . import record

ROOT = Path(__file__).resolve().parents[2]
GUIDES = [ROOT / "docs" / name for name in ("porting.md", "complete_programs.md")]
PROGRAMS = ROOT / "docs" / "porting"
NUM_PROCESSES = {"custom_loop": 1, "batch_norm": 1, "multi_worker": 2}
RECORDED = Path(__file__).with_name("porting.json")


def run(name: str, side: str) -> list[dict[str, Any]]:
    """Returns the last line that a program prints, in each of its processes."""
    finished = run_processes(
        PROGRAMS / f"{name}_{side}.py",
        num_processes=NUM_PROCESSES[name],
        python=record.PYTHON if side == "before" else sys.executable,
        timeout_s=300,
    )
    # Gloo, which connects JAX's processes, prints to stdout as well.
    printed = [[line for line in f.stdout.splitlines() if line.startswith("{")] for f in finished]
    return [json.loads(lines[-1]) for lines in printed]


def recorded(name: str) -> list[dict[str, Any]]:
    """Returns the recorded output of the program for TensorFlow."""
    return json.loads(RECORDED.read_text())[name]


def close(a: Any, b: Any, rel_tol: float) -> bool:
    """Whether two results have the same structure, and numbers within a relative tolerance."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(close(*pair, rel_tol) for pair in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k], rel_tol) for k in a)
    return type(a) is type(b) and math.isclose(a, b, rel_tol=rel_tol)


def main() -> None:
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    results = {name: run(name, "before") for name in NUM_PROCESSES}
    lines = [f"  {json.dumps(name)}: {json.dumps(result)}" for name, result in results.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
