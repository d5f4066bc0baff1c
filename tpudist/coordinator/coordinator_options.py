"""CoordinatorOptions: the options of a coordinator, and their checks."""

from __future__ import annotations

import dataclasses

QUEUE_SIZE_PER_WORKER = 256
"""Default number of closures per worker that may wait. TensorFlow's queue has 256 * 1024 places."""


@dataclasses.dataclass(frozen=True)
class CoordinatorOptions:
    """Options of `ClusterCoordinator`, which documents them.

    Raises:
        ValueError: If a number is too small.
    """

    closure_timeout_s: float | None = None
    max_staleness: int | None = None
    queue_size: int | None = None
    speculate: float | None = None

    def __post_init__(self) -> None:
        if self.closure_timeout_s is not None and not self.closure_timeout_s > 0:
            raise ValueError(
                f"ClusterCoordinator(closure_timeout_s={self.closure_timeout_s!r}): the timeout "
                f"must be a number of seconds above 0, or None for no limit."
            )
        if self.speculate is not None and not self.speculate > 1:
            raise ValueError(
                f"ClusterCoordinator(speculate={self.speculate!r}): speculate must be greater than "
                f"1, a multiple of the usual duration of a function, or None."
            )
        _check_count("max_staleness", self.max_staleness, least=0)
        _check_count("queue_size", self.queue_size, least=1)

    def queue_size_for(self, num_workers: int) -> int:
        """Returns the number of closures that may wait."""
        return self.queue_size or QUEUE_SIZE_PER_WORKER * num_workers


def _check_count(name: str, value: int | None, least: int) -> None:
    if value is not None and (isinstance(value, bool) or value < least):
        raise ValueError(
            f"ClusterCoordinator({name}={value!r}): {name} must be None or a whole number of "
            f"at least {least}."
        )
