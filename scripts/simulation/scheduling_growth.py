"""Measures what a scheduled function costs, with more and more workers."""

from __future__ import annotations

from simulation.actors import ACTORS
from simulation.growth import Cost
from simulation.scheduling import ScheduledRun

_PER_WORKER = 5


def measure_functions(count: int, seed: int = 0, *, measures_cpu: bool = True) -> Cost:
    """Returns the cost of one function at the program, and at the busiest worker.

    There are two servers. Starts of actors are included; `all_know_s` is the time of all functions.
    """
    run = ScheduledRun(count, 2, seed, per_worker=_PER_WORKER)
    run.simulation.scheduler.measures_cpu = measures_cpu
    run.start()
    if not run.simulation.go_on() or not run.has_joined:
        raise RuntimeError(f"functions of {count} workers did not finish")
    network, functions = run.simulation.network, count * _PER_WORKER
    workers = [p for actor, p in run.engine.actors.items() if actor.role == "worker"]
    return Cost(
        messages_0=network.num_messages[0, ACTORS] / functions,
        bytes_0=network.num_bytes[0, ACTORS] / functions,
        messages=max(network.num_messages[x.place, ACTORS] for x in workers) / _PER_WORKER,
        bytes=max(network.num_bytes[x.place, ACTORS] for x in workers) / _PER_WORKER,
        cpu_0_s=run.program.cpu_s / functions,
        cpu_s=max(x.cpu_s for x in workers) / _PER_WORKER,
        all_know_s=run.program.ended_s,
    )
