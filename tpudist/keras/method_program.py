"""The program of `fit` or a related method of a Keras model, for a plan; does not import Keras."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tpudist.array_types import PyTree


@dataclasses.dataclass(frozen=True)
class MethodProgram:
    """One step of a method of a model.

    Attributes:
        name: Name of the method and of the model.
        args: The state and the batch, as shapes.
        leaves: Name and role of each array among them.
        in_shardings: Placement of `args`, in the form of `planner.plan`; None if a strategy has
            placed them.
        surroundings: Makes the context in which the step is traced.
        jit: Called with the placed state; returns the compiled step.
    """

    name: str
    args: tuple[PyTree, PyTree]
    leaves: Sequence[tuple[str, str]]
    in_shardings: PyTree
    surroundings: Callable[[], AbstractContextManager]
    jit: Callable[[PyTree], Any]
