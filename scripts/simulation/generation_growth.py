"""Measures what the loss of a process costs a run that survives it."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from simulation.growth import Cost
from simulation.launching import LaunchedRun, surviving_training
from simulation.process import Process

_STEP_S = 0.2


def measure_loss(count: int, seed: int = 0, *, measures_cpu: bool = True) -> Cost:
    """Returns the cost from the death of a process until all others take a step without it.

    Each process has a host of its own, and the first host has the supervisor of the members.
    """
    run = LaunchedRun(count, 1, surviving_training(4, _STEP_S), seed)
    simulation, network = run.simulation, run.simulation.network
    simulation.scheduler.measures_cpu = measures_cpu
    run.start()

    def wait_until(is_over: Callable[[Process], bool]) -> None:
        workers = [x for x in run.workers if x.exit_code is None]
        if simulation.go_on(is_over=lambda: bool(workers) and all(map(is_over, workers))):
            return
        raise RuntimeError(f"a loss of {count} processes was not survived")

    def wait_for_steps(number: int) -> None:
        while len(run.workers) < count:
            before = len(run.workers)
            simulation.go_on(is_over=lambda before=before: len(run.workers) > before)
        wait_until(lambda x: x.progress >= number)

    wait_for_steps(1)
    simulation.go_on(simulation.scheduler.now_s + _STEP_S / 2)
    victim = next(x for x in run.workers if x.index == count // 2)
    began_s, began_cpu_s = simulation.scheduler.now_s, [_cpu_s(run, i) for i in range(count)]
    before = network.num_messages.copy(), network.num_bytes.copy()
    simulation.kill(victim)
    wait_until(lambda x: x.process_count() == count - 1 and x.progress >= 2)
    messages, num_bytes = (
        [sum(x for (place, _), x in (now - then).items() if place == i) for i in range(count)]
        for now, then in zip((network.num_messages, network.num_bytes), before, strict=True)
    )
    cpu_s = [_cpu_s(run, i) - began_cpu_s[i] for i in range(count)]
    return Cost(
        messages_0=messages[0],
        bytes_0=num_bytes[0],
        messages=max(messages[1:]),
        bytes=max(num_bytes[1:]),
        cpu_0_s=cpu_s[0],
        cpu_s=statistics.median(cpu_s[1:]),
        all_know_s=simulation.scheduler.now_s - began_s,
    )


def _cpu_s(run: LaunchedRun, place: int) -> float:
    return sum(x.cpu_s for x in (*run.supervisors, *run.workers) if x.place == place)
