"""Simulates runs of many processes, with faults, from seeds: replay a seed, or look for a bad one.

    python scripts/simulate.py --seeds 7                 # what each process printed
    python scripts/simulate.py --seeds 0:1000            # only problems
    python scripts/simulate.py --seeds 0:100 --processes 64 --kind SPLIT
    python scripts/simulate.py --run survival --seeds 7  # under supervisors, with survivors
    python scripts/simulate.py --run functions --seeds 7 # a coordinator, workers and servers
    python scripts/simulate.py --growth                  # what each operation costs, 16 to 4,096

A fault that a test found is replayed with its seed, as long as the code sends the same messages.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported, which looks for TPUs

from simulation import growth, outcomes, scheduling, survival
from simulation.faults import Kind
from simulation.operations import MEASURES
from simulation.process import Process

RUNS = {"training": outcomes.run, "survival": survival.run, "functions": scheduling.run}


def main() -> None:
    """Runs the simulations that the options select."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", default="0:100", help="seed, or first:end")
    parser.add_argument("--run", choices=RUNS, default="training", help="default: training")
    parser.add_argument("--processes", type=int, help="number of processes, hosts or workers")
    parser.add_argument("--kind", choices=[x.name for x in Kind], help="kind of all faults")
    parser.add_argument("--faults", type=int, help="number of faults; default: random, 0 to 3")
    parser.add_argument("--growth", action="store_true", help="measure operations, without faults")
    options = parser.parse_args()
    if options.growth:
        print_growth()
        return
    first, _, end = options.seeds.partition(":")
    kind = Kind[options.kind] if options.kind else None
    ends: collections.Counter[str] = collections.Counter()
    for seed in range(int(first), int(end or int(first) + 1)):
        run = RUNS[options.run]
        outcome, processes = run(seed, options.processes, kind, options.faults)
        ends["wrong" if outcome.problems else "all end" if outcome.cause else "all continue"] += 1
        if outcome.problems or not end:
            faults = ", ".join(map(str, outcome.faults)) or "no fault"
            print(f"seed {seed}: {faults} -> {outcome.cause or 'all continue'}")
            print("".join(f"  wrong: {x}\n" for x in outcome.problems), end="")
        if not end:
            for process in processes:
                print_process(process)
    print(", ".join(f"{count} {name}" for name, count in ends.items()))


def print_process(process: Process) -> None:
    """Prints what a process has printed, and how it ended."""
    print(f"process {process.index}: exit code {process.exit_code} at {process.ended_s:.3f} s")
    for line in (*process.logged, *process.printed):
        print(f"    {line}")


def print_growth() -> None:
    """Prints the costs of all operations."""
    for name, measure in MEASURES.items():
        costs = {n: measure(n) for n in growth.COUNTS}
        print(name)
        for field in dataclasses.fields(growth.Cost):
            values = {n: getattr(cost, field.name) for n, cost in costs.items()}
            numbers = ", ".join(f"{x:.3g}" for x in values.values())
            print(f"  {field.name:12} n^{growth.exponent(values):5.2f}  {numbers}")


if __name__ == "__main__":
    main()
