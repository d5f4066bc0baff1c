"""The first pass of a search: estimates all candidates without compiling them; and their plans."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpudist.planner import plain_step
from tpudist.planner.calibration import Calibration
from tpudist.planner.layouts.candidates import Candidate
from tpudist.planner.layouts.search_outcomes import promise
from tpudist.planner.plan_record import Plan
from tpudist.planner.roofline import plain_trace
from tpudist.planner.roofline.step_estimate import Estimator, StepEstimate
from tpudist.planner.show.progress import Progress

_log = logging.getLogger("tpudist")


def estimate_all(
    make_step: Callable[[Candidate], Sequence[Any]],
    candidates: Sequence[Candidate],
    calibration: Calibration | None,
    report: Progress,
    deadline: float,
) -> dict[Candidate, StepEstimate]:
    """Returns the estimates of the candidates that have one.

    The devices of a candidate need published rates, and its step must be traceable.
    """
    estimator = Estimator(make_step, [x.replica_axes for x in candidates], calibration)
    started = time.monotonic()
    found: dict[Candidate, StepEstimate] = {}
    # JAX caches the traces of functions inside a step, such as those of jax.numpy, for each mesh.
    first = {x.geometry: i for i, x in reversed([*enumerate(candidates)])}
    grouped = sorted(candidates, key=lambda x: first[x.geometry])
    for number, candidate in enumerate(grouped):
        if time.monotonic() > deadline:
            break
        report(f"estimating {number + 1}/{len(candidates)}", time.monotonic() - started)
        try:
            estimate = estimator.estimate(candidate)
        except Exception as error:  # of the user's function: planning the candidate reports it
            _log.debug("no estimate of %s", candidate.name, exc_info=error)
            continue
        if estimate is not None:
            found[candidate] = estimate
    return found


def order(
    candidates: Sequence[Candidate], estimates: dict[Candidate, StepEstimate]
) -> list[Candidate]:
    """Returns the candidates, the most promising first; equal ones keep their order."""
    return sorted(candidates, key=lambda x: promise(x, estimates.get(x)))


def plan(
    step: Sequence[Any],
    candidate: Candidate,
    defaults: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
) -> Plan:
    """Returns the plan of a candidate by the compiler.

    Args:
        step: Result of the user's function for this candidate.
        candidate: The candidate.
        defaults: Arguments of `plan` that those of the user override.
        overrides: Arguments of `plan` that override those of the user.
    """
    strategy, fn, args, *more = step
    options = {**defaults, **(more[0] if more else {}), **(overrides or {})}
    if strategy is None:
        return plain_step.plan(fn, *args, **plain_trace.plan_options(candidate, options))
    return strategy.plan(fn, args, topology=candidate.topology, **options)
