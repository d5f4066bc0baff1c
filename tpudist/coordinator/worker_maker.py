"""Creates the workers of a strategy, each in the process that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tpudist.coordinator.worker import Worker
from tpudist.ps.worker_session import WorkerSession


class WorkerMaker:
    """Creates workers.

    Args:
        make_session: Creates the session of a worker, in its process.
    """

    def __init__(self, make_session: Callable[[int], WorkerSession]):
        self._make_session = make_session

    def __call__(self, index: int) -> tuple[Any, ...]:
        """Returns the factory of a worker and its arguments, which can be sent to its process."""
        return _make_worker, index, self._make_session


def _make_worker(index: int, make_session: Callable[[int], WorkerSession]) -> Worker:
    devices = jax.local_devices()
    return Worker(index, devices[index % len(devices)], make_session)
