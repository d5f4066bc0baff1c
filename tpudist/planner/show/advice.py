"""Advice for a program that does not fit.

The advice is not compiled, so it may not suffice; `planner.search` compiles layouts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tpudist.planner.show.formats import format_bytes

if TYPE_CHECKING:
    from tpudist.planner.plan_figures import PlanFigures


def suggest_changes(plan: PlanFigures) -> tuple[str, ...]:
    """Returns sentences for a plan that does not fit, the most promising change first."""
    assert plan.refusal is not None
    refusal = plan.refusal
    advice = [
        "Compute activations again in the backward pass, if the program keeps them: "
        'remat="full", or jax.checkpoint in your own step.',
        "Give each replica fewer examples at a time: a smaller batch, or more microbatches.",
    ]
    if split := _split(plan):
        # Splitting shrinks parameters and optimizer state. If they are half of the memory or more,
        # smaller batches alone will hardly be enough.
        is_state_large = refusal.argument_bytes * 2 >= refusal.available_bytes
        advice.insert(0 if is_state_large else len(advice), split)
    if refusal.needed_bytes > refusal.available_bytes:
        times = refusal.needed_bytes / max(1, refusal.available_bytes)
        advice.append(
            f"Use more or larger chips: the program needs {times:.1f} times the "
            f"{format_bytes(refusal.available_bytes)} of this one."
        )
    advice.append(
        "Let the planner compile these and other layouts: tpudist plan --search, planner.search."
    )
    return tuple(advice)


def _split(plan: PlanFigures) -> str:
    """Returns the advice to split a replica over more devices; empty if it is split over all."""
    axes = {axis: size for axis, size in plan.mesh.items() if axis != "replica"}
    inside = math.prod(axes.values())
    replicas = plan.num_devices // inside
    if replicas < 2:
        return ""
    # All replicas become one, split by fsdp: the largest split needs the least memory.
    axes["fsdp"] = axes.get("fsdp", 1) * replicas
    options = " ".join(f"{axis}={size}" for axis, size in axes.items())
    current = (
        f"Each replica is split over {inside} devices"
        if inside > 1
        else "Each device holds all parameters and the optimizer's state"
    )
    return (
        f"{current}. Split it over more devices, as --replica-axes {options}: each then "
        "holds a smaller part."
    )
