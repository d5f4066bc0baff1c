"""The steps of one function, of which those are given up that were not called for long.

A compiled step takes megabytes, and a Python value that is another in each call makes one each.
"""

import collections
import dataclasses
import logging
from typing import Any

from tpudist.run.arguments import call_arguments
from tpudist.run.step import Step

_log = logging.getLogger("tpudist.compile")

# Of one function. They differ in Python values and structures, not in shapes.
MAX_STEPS = 64


@dataclasses.dataclass(eq=False)
class Form:
    """Calls of one function whose arguments look alike, as far as is looked in a call.

    Attributes:
        kinds: Of what is fed for the arguments.
        numbers: By the structure of all arguments: which of them are numbers that are fed.
        steps: By all of the structure.
        latest: By what is known without looking into plain arguments.
    """

    kinds: call_arguments.Kinds
    numbers: dict[tuple, frozenset[int]] = dataclasses.field(default_factory=dict)
    steps: dict[Any, Step] = dataclasses.field(default_factory=dict)
    latest: dict[Any, Step] = dataclasses.field(default_factory=dict)


class RecentSteps:
    """The steps of one function in the order of their last calls."""

    def __init__(self, name: str):
        """`name` is the function's."""
        self._name = name
        # Each with the forms in which it is, and its keys there.
        self._steps: collections.OrderedDict[Step, list[Any]] = collections.OrderedDict()
        self._was_told = False

    def __len__(self) -> int:
        """How many there are."""
        return len(self._steps)

    def touch(self, step: Step) -> None:
        """Notes that `step` is called."""
        if len(self._steps) > 1:
            self._steps.move_to_end(step)

    def add(self, step: Step, form: Form, key: Any) -> None:
        """Adds `step`, and gives up the one whose last call is longest ago if they are too many."""
        form.steps[key] = step
        self._steps.setdefault(step, []).append((form, key))
        if len(self._steps) <= MAX_STEPS:
            return
        self._forget(*self._steps.popitem(last=False))
        _log.log(
            logging.DEBUG if self._was_told else logging.WARNING,
            "%s has more than %d compiled programs, which differ in the Python values or the "
            "structure of its arguments. tpudist deletes the least recently called one, and "
            "compiles it again if it is called. Pass values that change often as arrays.",
            self._name,
            MAX_STEPS,
        )
        self._was_told = True

    def drop(self, form: Form) -> None:
        """Gives up all steps of `form`."""
        for step, places in list(self._steps.items()):
            if any(its_form is form for its_form, _ in places):
                self._forget(step, self._steps.pop(step))

    def _forget(self, step: Step, places: list[tuple[Form, Any]]) -> None:
        for form, key in places:
            form.steps.pop(key, None)
            for known in [k for k, other in form.latest.items() if other is step]:
                del form.latest[known]
