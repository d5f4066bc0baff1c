"""The steps of one function in the order of their last calls; the oldest are deleted.

A compiled step takes megabytes, and a Python value that changes in each call compiles a step each
time. This file bounds their number.
"""

import collections
import dataclasses
import logging
from typing import Any

from tpudist.run.arguments import call_arguments
from tpudist.run.step import Step

_log = logging.getLogger("tpudist.compile")

# Number of steps of one function that are kept, and of other records of it that grow with such
# calls. Steps differ in Python values and structures; shapes are counted apart (`step.MAX_SHAPES`).
MAX_STEPS = 64


@dataclasses.dataclass(eq=False)
class CallForm:
    """Calls of one function whose arguments look alike to `Flattener.elements`.

    Attributes:
        kinds: Kinds of the elements that are fed for the arguments.
        numbers: Positions of the Python numbers that are fed, by the nesting of all arguments.
        steps: The steps, by the complete key: structure, static values, NNX structure, row groups.
        latest: The step that was called last, by the part of the key that needs no look into plain
            arguments. A call tries that one; `jit` notices if it does not fit.
    """

    kinds: call_arguments.Kinds
    numbers: dict[tuple, frozenset[int]] = dataclasses.field(default_factory=dict)
    steps: dict[tuple, Step] = dataclasses.field(default_factory=dict)
    latest: dict[Any, Step] = dataclasses.field(default_factory=dict)


class RecentSteps:
    """The steps of the function `name` in the order of their last calls.

    Forms contain no other steps: a step is added to its form here (`add`), and a step that is
    deleted here leaves its forms. So `touch` finds every step that a call has found.
    """

    def __init__(self, name: str):
        self._name = name
        # Each step with its places: pairs of a form and a key there.
        self._steps: collections.OrderedDict[Step, list[tuple[CallForm, tuple]]] = (
            collections.OrderedDict()
        )
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._steps)

    def touch(self, step: Step) -> None:
        """Records a call of `step`."""
        if len(self._steps) > 1:
            self._steps.move_to_end(step)

    def add(self, step: Step, form: CallForm, key: tuple) -> None:
        """Adds `step`. If there are too many, deletes the least recently called one."""
        form.steps[key] = step
        self._steps.setdefault(step, []).append((form, key))
        if len(self._steps) <= MAX_STEPS:
            return
        self._forget(*self._steps.popitem(last=False))
        _log.log(
            logging.DEBUG if self._has_warned else logging.WARNING,
            "%s has more than %d compiled programs, which differ in the Python values or the "
            "structure of its arguments. tpudist deletes the least recently called one, and "
            "compiles it again if it is called. Pass values that change often as arrays.",
            self._name,
            MAX_STEPS,
        )
        self._has_warned = True

    def drop(self, form: CallForm) -> None:
        """Deletes all steps of `form`."""
        for step, places in list(self._steps.items()):
            if any(its_form is form for its_form, _ in places):
                self._forget(step, self._steps.pop(step))

    def _forget(self, step: Step, places: list[tuple[CallForm, tuple]]) -> None:
        for form, key in places:
            form.steps.pop(key, None)
            for known in [k for k, other in form.latest.items() if other is step]:
                del form.latest[known]
