"""Runs with the faults of many seeds, one after the other, and a table of what became of them.

`python fault_storm.py FOLDER FIRST LAST [restart]`, in this folder, with PYTHONPATH=../shared;
with `restart` the programs start again in their processes. The exit code is 1 if one fault was
neither survived nor named.
"""

import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from survival_runs import Run, require_outcome, run_with_fault


def listening_ports() -> set[str]:
    """Ports of this host on which a process listens."""
    found = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                found.add(words[1])
    return found


def main(folder: Path, first: int, last: int, env: dict[str, str]) -> int:
    if folder.exists():
        sys.exit(f"{folder} exists: pass a new folder, only for the files of this storm.")
    temporary = folder / "temporary"
    temporary.mkdir(parents=True)
    os.environ["TMPDIR"] = str(temporary)  # of all that it starts
    options = ("-n", "4", "--devices-per-process", "2")
    with Run(folder / "calm", *options, env={"PAUSE_S": "0"}) as run:
        calm = run.wait()
    gaps: dict[str, list[float]] = defaultdict(list)
    outcomes: Counter[tuple[str, str]] = Counter()
    num_losses = 0
    for seed in range(first, last):
        files, ports = set(temporary.iterdir()), listening_ports()
        began = time.monotonic()
        try:
            fault, seen = run_with_fault(folder / str(seed), seed, **env)
        except AssertionError as error:  # it has not ended
            outcomes["no end", "WRONG"] += 1
            print(seed, str(error)[-8000:], flush=True)
            continue
        outcome = "as said"
        try:
            require_outcome(fault, seen, calm)
            assert set(temporary.iterdir()) <= files, "files are left"
            assert listening_ports() <= ports, "ports are left"
        except AssertionError as error:
            outcome = "WRONG"
            print(seed, fault, str(error)[-8000:], flush=True)
        took = [seen.seconds_to_new_step(x) for x in fault.times[-1:]]
        gaps[fault.kind] += took
        num_losses += len(seen.lines)
        outcomes[fault.kind, outcome] += 1
        print(
            f"seed {seed}: {fault.kind}, {fault.count} processes, {fault.spares} spare(s), exit "
            f"code {seen.code}, {outcome}; new step after {took} s; {time.monotonic() - began:.1f} "
            f"s in all",
            flush=True,
        )
    print("\nfault | runs | outcome | median | longest")
    for (kind, outcome), count in sorted(outcomes.items()):
        known = sorted(gaps[kind])
        figures = f"{statistics.median(known):.2f} | {known[-1]:.2f}" if known else "- | -"
        print(f"{kind} | {count} | {outcome} | {figures}")
    known = sorted(x for kind in gaps for x in gaps[kind])
    if known:
        p99 = known[min(len(known) - 1, int(0.99 * len(known)))]
        print(f"all: p50 {statistics.median(known):.2f} s, p99 {p99:.2f} s, of {len(known)}")
    print(f"{num_losses} losses compared")
    return int(any(outcome != "as said" for _, outcome in outcomes))


if __name__ == "__main__":
    mode = {"IN_PROCESS": "0"} if sys.argv[4:] == ["restart"] else {}
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), mode))
