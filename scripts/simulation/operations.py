"""All operations whose growth is measured, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

from simulation import generation_growth, growth, scheduling_growth
from simulation.growth import Cost

LOSS = "loss of a process, until the others take a step"
FUNCTION = "one function of a coordinator"
MEASURES: dict[str, Callable[..., Cost]] = {
    **{x.name: functools.partial(growth.measure, x) for x in growth.OPERATIONS},
    LOSS: generation_growth.measure_loss,
    FUNCTION: scheduling_growth.measure_functions,
}
"""Name of an operation -> its measurement, which is called with the number of processes."""
