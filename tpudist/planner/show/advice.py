"""What to try when a program does not fit, without having tried it: see `planner.search`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tpudist.planner.show.words import format_bytes

if TYPE_CHECKING:
    from tpudist.planner.plan_figures import PlanFigures


def suggest_changes(plan: PlanFigures) -> tuple[str, ...]:
    """Sentences, the most promising change first, for a plan that does not fit."""
    assert plan.refusal is not None
    refusal = plan.refusal
    tries = [
        'Compute activations again in the backward pass (remat="full"), if the program keeps them.',
        "Give each replica fewer examples at a time: a smaller batch, or more microbatches.",
    ]
    if split := _split(plan):
        state_is_much = refusal.argument_bytes * 2 >= refusal.available_bytes
        tries.insert(0 if state_is_much else len(tries), split)
    if refusal.needed_bytes > refusal.available_bytes:
        times = refusal.needed_bytes / max(1, refusal.available_bytes)
        tries.append(
            f"Use more or larger chips: the program needs {times:.1f} times the "
            f"{format_bytes(refusal.available_bytes)} of this one."
        )
    tries.append(
        "Let the planner compile these and other layouts: tpudist plan --search, planner.search."
    )
    return tuple(tries)


def _split(plan: PlanFigures) -> str:
    """How to split a replica over more devices; empty if it is split over all."""
    inside = math.prod(size for axis, size in plan.mesh.items() if axis != "replica")
    replicas = plan.num_devices // inside
    if replicas < 2:
        return ""
    axes = {axis: size for axis, size in plan.mesh.items() if axis != "replica"}
    axes["fsdp"] = axes.get("fsdp", 1) * replicas
    told = " ".join(f"{axis}={size}" for axis, size in axes.items())
    now = (
        f"Each replica is split over {inside} devices"
        if inside > 1
        else "Each device holds all parameters and the optimizer's state"
    )
    return (
        f"{now}. Split it over more devices, as --replica-axes {told}: each then holds a smaller "
        "part."
    )
