"""Limits how far the host runs ahead of CPU devices.

Emulated devices are threads on few cores, which starve each other at collectives: with hundreds of
steps queued, each ran 10 times slower (jax 0.10, two cores). So at most two steps are in flight.
"""

import collections
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

_log = logging.getLogger("tpudist")

# Two, so that the host prepares one step while the devices run another.
MAX_STEPS_IN_FLIGHT = 2


class Throttle:
    """Keeps the host at most `MAX_STEPS_IN_FLIGHT` steps ahead of CPU devices.

    It does nothing on other platforms, whose queues are deep and in hardware.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self.is_active = devices[0].platform == "cpu" and len(devices) > 1
        self.in_flight: collections.deque[jax.Array] = collections.deque()

    def before_step(self, *inputs: Sequence[Any]) -> None:
        """Waits until one more step, which computes with the arrays in `inputs`, may start.

        Raises:
            jax.errors.JaxRuntimeError: If an earlier step has failed that computed one of `inputs`.
                The failure of another step is only logged here. A read of its results raises the
                error, as on devices with their own queue.
        """
        waiting = self.in_flight
        try:
            while len(waiting) >= MAX_STEPS_IN_FLIGHT:
                # `_wait_for`, inlined: one function call less per step.
                oldest = waiting.popleft()
                is_gone = oldest.is_deleted()
                if not is_gone:
                    try:
                        oldest.block_until_ready()
                    except jax.errors.JaxRuntimeError as error:
                        if not _is_donated(error):
                            raise
                        is_gone = True
                # The output of the oldest step may have been donated to a later one. If that is the
                # only other step in flight, it finishes after the oldest, so wait for it instead.
                if is_gone and len(waiting) == 1 and _wait_for(waiting[0]):
                    waiting.popleft()
        except jax.errors.JaxRuntimeError as error:
            for x in itertools.chain(*inputs):
                if isinstance(x, jax.Array) and not isinstance(x, Tracer):
                    _wait_for(x)
            _log.warning("An earlier step has failed: %s", error)

    def after_step(self, output: jax.Array) -> None:
        """Records any output of the step that was just started.

        A traced output belongs to a function that the user compiles, and is not a step yet.
        """
        if self.is_active and not isinstance(output, Tracer):
            self.in_flight.append(output)


def _wait_for(array: jax.Array) -> bool:
    """Waits until `array` has been computed; returns whether it exists, so that this is known."""
    if array.is_deleted():
        return False
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        if _is_donated(error):
            return False
        raise
    return True


def _is_donated(error: Exception) -> bool:
    """Whether a wait has failed because the array was donated on some devices only."""
    # Memory that the host reads in place, for example to save a checkpoint, is not donated.
    return "deleted or donated" in str(error)
