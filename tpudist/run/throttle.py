"""Limits how far the host runs ahead of CPU devices.

With hundreds of steps queued, each ran 10 times slower (jax 0.10, two cores). At most two are in
flight.
"""

import collections
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

_log = logging.getLogger("tpudist")

MAX_STEPS_IN_FLIGHT = 2


class Throttle:
    """Keeps the host at most `MAX_STEPS_IN_FLIGHT` steps ahead of CPU devices.

    On other platforms it does nothing: their queues are deep and in hardware.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        """For steps that run on `devices`."""
        self.active = devices[0].platform == "cpu" and len(devices) > 1
        self._in_flight: collections.deque[jax.Array] = collections.deque()

    def before_step(self, *inputs: Sequence[Any]) -> None:
        """Waits until one more step may be dispatched, which computes with the arrays in `inputs`.

        Raises:
            jax.errors.JaxRuntimeError: An earlier step has failed, and this one would compute with
                what it gave. Of another one that is for those to see who read its results, as on
                devices with a queue of their own; here it is logged.
        """
        try:
            self._wait()
        except jax.errors.JaxRuntimeError as error:
            for x in itertools.chain(*inputs):
                if isinstance(x, jax.Array) and not isinstance(x, Tracer):
                    _wait_for(x)
            _log.warning("An earlier step has failed: %s", error)

    def _wait(self) -> None:
        waiting = self._in_flight
        while len(waiting) >= MAX_STEPS_IN_FLIGHT:
            oldest = waiting.popleft()
            # A step whose output was donated to a later one has no array of its own to wait for;
            # the later one has, and it finishes after.
            if not _wait_for(oldest) and len(waiting) == 1 and _wait_for(waiting[0]):
                waiting.popleft()

    def after_step(self, output: jax.Array) -> None:
        """Remembers any output of the step that was just dispatched.

        One that is traced, in a function that the user compiles, is no step yet.
        """
        if self.active and not isinstance(output, Tracer):
            self._in_flight.append(output)


def _wait_for(array: jax.Array) -> bool:
    """Waits until `array` has been computed; whether it is still there to wait for."""
    if array.is_deleted():
        return False
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        # Donated on some devices only: memory that the host reads in place, as one that saves a
        # checkpoint does, is not given away.
        if "deleted or donated" in str(error):
            return False
        raise
    return True
