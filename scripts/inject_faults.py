"""Injects faults into the training steps of `examples/` and README, and counts those found.

    python scripts/inject_faults.py [NAME ...]

Each fault is a change of a few lines of a right program, such as a user makes by mistake. The
program runs up to its first step, which `Strategy.verify` compares with one device. A fault is
found if the report has a difference on full batches, or if tracing the step is an error. Its line
is right if it is a changed line, the line of the reduction or the line that uses its result. The
steps as they are must have no difference. Prints one line per fault, and a summary.
"""

import argparse
import contextlib
import importlib.util
import io
import pathlib
import re
import sys
import tempfile
import time
import warnings
from typing import Any

import tpudist
from fault_sites import SITES, accepted_lines, make_faults, read


class Verified(Exception):
    """Ends a program at its first step, with the report."""


def verify_first_step(self: Any, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None):
    """Stands for `Strategy.run`."""
    raise Verified(self.verify(fn, args, kwargs, options))


def run(name: str, source: str, options: dict[str, Any], folder: str) -> tuple[str, list[str], str]:
    """Runs a program up to its first step.

    Returns:
        The result, "ok", "difference" or "error"; the lines that it names; and the whole report.
    """
    path = pathlib.Path(folder) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module)
            if hasattr(module, "main"):
                module.main(**options)
    except Verified as end:
        report = end.args[0]
        found = [x for x in report.differences if x.comparison != "tail"]
        return ("difference" if found else "ok"), [x.where for x in found], str(report)
    except ValueError as error:
        if "would differ between replicas" not in str(error):
            raise
        return "error", re.findall(rf"{re.escape(path.name)}:\d+", str(error)), str(error)
    raise RuntimeError(f"{name} took no step")


def main(names: list[str], num_devices: int, *, prints_reports: bool) -> int:
    """Injects all faults; returns the number of faults that were missed, and of false alarms."""
    tpudist.emulate(num_devices)
    tpudist.Strategy.run = verify_first_step  # type: ignore[method-assign]
    found = placed = total = false = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            site, source = SITES[name], read(name)
            verdict, _, _ = run(f"{name}_right", source, site.options, folder)
            false += verdict != "ok"
            print(f"{name:18} as it is: {verdict}", flush=True)
            for i, (kind, old, new) in enumerate(make_faults(site)):
                if source.count(old) < 1:
                    raise ValueError(f"{name} has no line for '{kind}': {old}")
                start = time.perf_counter()
                changed = source.replace(old, new, 1)
                verdict, lines, report = run(f"{name}_{i}", changed, site.options, folder)
                if prints_reports:
                    print(report)
                accepted = accepted_lines(source, old, new, site)
                numbers = [int(x.rpartition(":")[2]) for x in lines if x]
                is_right = bool(numbers) and numbers[0] in accepted
                is_right |= kind == "all replicas read the same rows"  # its report names arguments
                total, found = total + 1, found + (verdict != "ok")
                placed += verdict != "ok" and is_right
                mark = "MISSED" if verdict == "ok" else "" if is_right else f"line {numbers[:3]}"
                seconds = time.perf_counter() - start
                print(f"{name:18} {kind:50} {verdict:10} {seconds:5.1f} s {mark}", flush=True)
    print(
        f"{found} of {total} faults found ({found / total:.1%}), the right line named for {placed} "
        f"({placed / total:.1%}); {false} right programs with a difference."
    )
    return total - found + false


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="examples; all by default")
    parser.add_argument("--devices", type=int, default=4, help="number of emulated devices")
    parser.add_argument("-v", action="store_true", help="print each report")
    given = parser.parse_args()
    sys.exit(bool(main(given.names or list(SITES), given.devices, prints_reports=given.v)))
