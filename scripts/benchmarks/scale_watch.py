"""Growth of one round of watching processes: CPU of process 0 to read, parse and compare reports.

A child process, which has JAX's coordination service, measures it. The other processes are only
reports in that service, as many as a run of that size has.
"""

from __future__ import annotations

import itertools
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.figures import Figure

SUITE = "watching processes"
NUMBERS = (16, 256, 1024, 4096)
TARGET_MS, TARGET_EXPONENT = 20, 1.1
_NUM_CALLS = 7
_PARTS = ("read", "parse", "compare")
# One program, all at one position; and two programs in turn, each process at another position.
_PROGRAMS = {"one program": 1, "two programs in turn, all positions differ": 2}


def figures() -> Iterator[Figure]:
    """CPU milliseconds of each part of a round, and how parsing and comparing grow."""
    command = [sys.executable, str(Path(__file__)), *map(str, NUMBERS)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    for subject, rounds in json.loads(output.splitlines()[-1]).items():
        for number, parts in zip(NUMBERS, rounds, strict=True):
            where = f"{number} processes, {subject}"
            read = "CPU ms of a round, reading (JAX's service, C++)"
            yield Figure(SUITE, where, read, parts["read"], None)
            python = parts["parse"] + parts["compare"]
            target = f"at most {TARGET_MS} ms"
            name = "CPU ms of a round, parsing and comparing"
            met = python <= TARGET_MS
            yield Figure(SUITE, where, name, python, None, target, met, details=parts)
        few, many = (x["parse"] + x["compare"] for x in (rounds[1], rounds[-1]))
        exponent = math.log(many / few) / math.log(NUMBERS[-1] / NUMBERS[1])
        yield Figure(
            SUITE,
            f"{NUMBERS[1]} to {NUMBERS[-1]} processes, {subject}",
            "exponent of parsing and comparing",
            exponent,
            None,
            f"at most {TARGET_EXPONENT}",
            exponent <= TARGET_EXPONENT,
        )


def _measure(number: int, num_programs: int, client: Any) -> dict[str, float]:
    """Returns the least CPU milliseconds of each part of a round: other programs run, too."""
    from tpudist.processes.judge.process_judge import Judge
    from tpudist.processes.judge.process_reports import Report

    judge, folder = Judge(number), f"{num_programs}/{number}/"
    found: dict[str, list[float]] = {part: [] for part in _PARTS}
    for beat in range(_NUM_CALLS):
        for index in range(number):
            report = _make_report(index, beat, num_programs)
            client.key_value_set(f"{folder}{index}", report.encode(), True)
        times = [time.process_time()]  # of all threads, so with those of the service
        texts = client.key_value_dir_get(folder)
        times.append(time.process_time())
        reports = {report.process: report for _, x in texts for report in [Report.decode(x)]}
        times.append(time.process_time())
        verdict = judge.judge(reports)
        times.append(time.process_time())
        assert verdict is None
        for part, (start, end) in zip(_PARTS, itertools.pairwise(times), strict=True):
            found[part].append(1e3 * (end - start))
    return {part: min(values) for part, values in found.items()}


def _make_report(index: int, beat: int, num_programs: int) -> Any:
    from tpudist.processes import process_state, run_order
    from tpudist.processes.judge.process_reports import OrderReport, Report

    order = run_order.RunOrder()
    is_spread = num_programs > 1
    first = 1000 + 100 * beat + (index * 7919 % 4096 if is_spread else 0)
    for position in range(first, first + run_order.MAX_RUNS):
        order.add(1 + position % num_programs)
    runs = [(number, start + first, times) for number, start, times in order.last_runs()]
    names = {str(n): f"Strategy.run of 'train_{n}' (train.py:{n}), as before" for n in (1, 2)}
    details = {"why": "", "exit_code": 1, "names": {"a": names}, "place": process_state.here()}
    return Report(index, beat, "running", {"a": OrderReport.of(runs)}, json.dumps(details))


def main(numbers: list[int]) -> None:
    """Prints the figures as JSON: programs -> the parts of a round for each number."""
    from tpudist.xla import internals

    jax.config.update("jax_platforms", "cpu")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
    client = internals.coordination_client()
    found = {
        subject: [_measure(number, num_programs, client) for number in numbers]
        for subject, num_programs in _PROGRAMS.items()
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]])
