"""All operations whose growth is measured, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

from simulation.generation_growth import measure_loss
from simulation.growth import OPERATIONS, Cost, measure
from simulation.scheduling_growth import measure_functions

LOSS = "loss of a process, until the others take a step"
FUNCTION = "one function of a coordinator"
MEASURES: dict[str, Callable[..., Cost]] = {
    **{x.name: functools.partial(measure, x) for x in OPERATIONS},
    LOSS: measure_loss,
    FUNCTION: measure_functions,
}
"""Name of an operation -> its measurement, which is called with the number of processes."""
