"""Simulates runs of many processes, with faults, from seeds: replay a seed, or look for a bad one.

    python scripts/simulate.py --seeds 7                 # what each process printed
    python scripts/simulate.py --seeds 0:1000            # only what is wrong
    python scripts/simulate.py --seeds 0:100 --processes 64 --kind SPLIT
    python scripts/simulate.py --growth                  # what each operation costs, 16 to 4,096

A fault that a test found is replayed with its seed, as long as the code sends the same messages.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses

from simulation import faults, growth
from simulation.process import Process


def main() -> None:
    """Runs what the options say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:100", help="seed, or first:end")
    parser.add_argument("--processes", type=int, help="number of processes; default: random, to 16")
    parser.add_argument("--kind", choices=[x.name for x in faults.Kind], help="default: random")
    parser.add_argument("--growth", action="store_true", help="measure operations, without faults")
    options = parser.parse_args()
    if options.growth:
        print_growth()
        return
    first, _, end = options.seeds.partition(":")
    kind = faults.Kind[options.kind] if options.kind else None
    ends: collections.Counter[str] = collections.Counter()
    for seed in range(int(first), int(end or int(first) + 1)):
        outcome, processes = faults.run(seed, options.processes, kind)
        ends["wrong" if outcome.problems else "all end" if outcome.cause else "all continue"] += 1
        if outcome.problems or not end:
            print(f"seed {seed}: {outcome.fault} -> {outcome.cause or 'all go on'}")
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
    for operation in growth.OPERATIONS:
        costs = {n: growth.measure(operation, n) for n in growth.COUNTS}
        print(operation.name)
        for field in dataclasses.fields(growth.Cost):
            values = {n: getattr(cost, field.name) for n, cost in costs.items()}
            numbers = ", ".join(f"{x:.3g}" for x in values.values())
            print(f"  {field.name:12} n^{growth.exponent(values):5.2f}  {numbers}")


if __name__ == "__main__":
    main()
